"""Submission and completion rings that GPU kernels or a CPU thread fill and drain."""
