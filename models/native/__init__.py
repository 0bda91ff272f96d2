"""Native operations for few channels, in C: see records/kernels.md."""
