"""Planners side by side: suites of problems, a runner that can be resumed, tables and curves."""
