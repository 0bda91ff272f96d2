"""Memory and time of a training step, before anything is allocated. No TensorFlow."""
