"""HOW LONG, HOW MUCH: cost models of groups, collectives and memory."""
