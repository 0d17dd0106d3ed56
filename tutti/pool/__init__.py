"""The opened members of a pool: superblocks, record tables, and blocking I/O on them."""
