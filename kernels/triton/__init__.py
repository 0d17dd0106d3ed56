"""Kernels in Triton, for layouts that a table describes better than strides do."""
