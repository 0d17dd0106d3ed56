"""`tutti bench residency`: ways to use the page cache under a memory limit."""
