"""`tutti bench figures`: figures from results."""
