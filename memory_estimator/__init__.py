"""Memory and time of a training step, and of a whole run, before anything is allocated. No
TensorFlow."""
