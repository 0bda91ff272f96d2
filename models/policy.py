"""What a block keeps for its backward pass under each memory policy. No TensorFlow: the estimator reads it too."""

from models.config import UNetConfig


def keeps_hidden(config: UNetConfig, level: int, decoder: bool) -> bool:
    """Whether a block keeps its convolutions' outputs, or convolves again."""
    return config.policy == "balanced" or decoder
