"""What a training step holds in memory, before anything is allocated. No TensorFlow."""
