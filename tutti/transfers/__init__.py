"""Transfers between memory and the medium, and when each is issued."""
