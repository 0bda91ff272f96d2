"""Runs of variants, seeds and folds: each trained and scored in processes of its own, then taken
together."""
