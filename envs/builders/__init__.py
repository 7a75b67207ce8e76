"""Builders: sequential decision processes that build a plan."""
