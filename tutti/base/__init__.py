"""Helpers for every layer: units, checks, threads, clocks.  Must not know KV."""
