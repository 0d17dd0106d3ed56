"""Where a pool's profile comes from: a file, the cache, a short measurement, or estimates."""
