"""WHAT is placed: capture a PyTorch module as an op graph of groups."""
