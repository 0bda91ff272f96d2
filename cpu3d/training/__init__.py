"""`train`: the loop, the compiled step, losses, checkpoints, validation, log."""
