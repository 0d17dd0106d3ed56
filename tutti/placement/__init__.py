"""Placement of objects: the slot of each object, and the choice of the next slots."""
