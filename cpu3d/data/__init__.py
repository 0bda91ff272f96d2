"""NIfTI files into a store of volumes, and that into tf.data."""
