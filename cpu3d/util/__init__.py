"""Atomic files, locks, child processes, progress, benchmark records."""
