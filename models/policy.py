"""What a block keeps for its backward pass under each memory policy. No TensorFlow: the estimator reads it too.

"speed"     every map that a gradient reads; blocks are the single layers of models/blocks.py.
"balanced"  a block keeps both convolutions' outputs and its own. What lies between them, and the up-sampled map, is
            made again: norms and an up-convolution, a twentieth of a step.
"lean"      a block of the encoder keeps its input and output alone, and convolves again. One of the decoder keeps what
            it keeps under "balanced": the peak is in the finest decoder block, whose backward pass begins where its
            forward pass ended, so there it has all of that at hand anyway; the coarser ones are small beside it.
"slabs"     the finest level in slabs (models/slabs.py), the others as under "lean".
"""

from models.config import UNetConfig


def keeps_hidden(config: UNetConfig, decoder: bool) -> bool:
    """Whether a block keeps its convolutions' outputs, or makes them again."""
    return config.policy not in ("lean", "slabs") or decoder
