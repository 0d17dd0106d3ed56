"""Measurements: bandwidth, trace replay, time to first token; installed as tutti.bench."""
