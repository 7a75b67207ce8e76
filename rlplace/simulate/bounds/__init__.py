"""What the lower limits of `rlplace.simulate.bound` are made of: the least that anything costs."""
