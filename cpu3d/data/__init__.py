"""From NIfTI to a store of volumes, and from that to tf.data."""
