"""`tutti bench slack`: the scheduler's policies beside a model's compute."""
