"""LOOK: tables, timeline pictures and traces."""
