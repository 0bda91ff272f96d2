"""Own convolutions for few channels, in C: see docs/kernels.md."""
