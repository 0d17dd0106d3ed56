"""What moves between memory and the medium, and when it is issued."""
