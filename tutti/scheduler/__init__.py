"""Fits reads and writes into the slack that the model's own work leaves: pure policy."""
