"""`tutti bench slack`: the scheduler's policies during a model's compute."""
