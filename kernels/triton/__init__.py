"""Kernels in Triton, for pages that a table of addresses describes better than strides do."""
