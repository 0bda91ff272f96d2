"""Volumes of a store as arrays: opened, cut out, read ahead of the steps."""
