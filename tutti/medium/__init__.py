"""What the bytes on a medium mean; no I/O."""
