"""Post-processing: which parts of an answer are removed, and the cases that decide it."""
