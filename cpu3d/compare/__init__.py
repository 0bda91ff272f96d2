"""Variants under one budget, paired differences."""
