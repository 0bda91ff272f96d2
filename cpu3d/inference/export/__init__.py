"""`export`: a trained network for other programs."""
