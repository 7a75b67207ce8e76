"""The library's model families: their shapes (without torch) and how to make them."""
