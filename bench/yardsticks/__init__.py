"""Benchmarks of other projects, run on the store; their code is not part of this project."""
