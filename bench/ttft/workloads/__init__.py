"""Prompts that serving benchmarks send: data sets, generators, orders and exports."""
