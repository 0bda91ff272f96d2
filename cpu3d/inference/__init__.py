"""Prediction in one pass or by windows, scores, folds and ensembles."""
