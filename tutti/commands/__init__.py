"""The commands of `tutti`, one module for each group."""
