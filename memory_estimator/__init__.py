"""How much memory and time a training run takes, before anything is allocated. No TensorFlow."""
