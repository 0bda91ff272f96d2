"""A trained network for other programs."""
