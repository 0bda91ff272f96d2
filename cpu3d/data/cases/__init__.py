"""A case from its files, to store or to predict: channels, voxels, what may be unusual."""
