"""A sample of a training, from stored voxels to image and target: in C, and in NumPy."""
