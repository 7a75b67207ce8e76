"""WHEN: event simulation of a plan, its estimate, and a proved bound."""
