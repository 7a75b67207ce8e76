"""WHERE: devices, nodes and links."""
