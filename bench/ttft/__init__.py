"""`tutti bench ttft`: time to first token of a running server."""
