"""Arctic core."""
