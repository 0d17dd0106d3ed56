"""Meaning of the bytes on a medium: formats, pure.  Must do no I/O."""
