"""From ops to groups: where a model may be cut, and what the groups are called."""
