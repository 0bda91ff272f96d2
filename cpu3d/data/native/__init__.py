"""A sample of a training, from stored voxels to the network's image and target: in C, and in NumPy."""
