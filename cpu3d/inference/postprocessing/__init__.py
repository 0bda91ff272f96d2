"""Post-processing: what is removed from an answer, and the cases that decide it."""
