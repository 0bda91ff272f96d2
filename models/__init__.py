"""The network: its configuration, its plan on paper, and the Keras model. Nothing here knows about
data or training."""
