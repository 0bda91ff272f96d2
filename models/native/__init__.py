"""Own operations for few channels, in C: see docs/kernels.md."""
