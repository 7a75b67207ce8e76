"""Placers: what planners are to instances, for the problems of public op-graph files."""
