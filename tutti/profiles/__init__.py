"""Finds a pool's profile: in a file, in the cache, by a short measurement, or by estimates."""
