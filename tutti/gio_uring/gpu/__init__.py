"""Rings, kernels and copies on a GPU."""
