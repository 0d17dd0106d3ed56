"""One node, many processes: the agent that owns pools, its clients, and the catalogue."""
