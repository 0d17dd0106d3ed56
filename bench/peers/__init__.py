"""`tutti bench peers`: the store compared with other ways to keep pages on an SSD."""
