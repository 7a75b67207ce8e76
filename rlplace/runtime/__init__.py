"""DOES IT: runs a plan on torch.distributed and measures it."""
