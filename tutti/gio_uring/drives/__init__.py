"""Drives and block devices: how they are found, opened and reset."""
