"""Layouts of a piece: rules of single ops, the search over them, and the local programs."""
