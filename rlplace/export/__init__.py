"""HAND OVER: one file for each trainer that a plan is exported to."""
