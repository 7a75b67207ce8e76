"""How `torch.export` is run, and what is done about what it refuses."""
