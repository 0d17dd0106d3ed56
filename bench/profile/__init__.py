"""`tutti profile`: measures a profile for the scheduler."""
