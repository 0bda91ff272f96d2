"""Variants under one budget, paired differences, the resolution study."""
