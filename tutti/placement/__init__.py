"""Which slot holds which object, and which slot is next."""
