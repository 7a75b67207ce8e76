"""Decisions without learning: rules, grids, dynamic programs, local search."""
