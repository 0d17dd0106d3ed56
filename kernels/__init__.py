"""Device code, its headers and the native library's sources, installed as tutti.kernels."""
