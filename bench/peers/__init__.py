"""`tutti bench peers`: the store beside other ways to keep pages on an SSD."""
