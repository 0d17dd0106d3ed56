"""What every layer uses and what knows nothing of KV: units, checks, threads, clocks."""
