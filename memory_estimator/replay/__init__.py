"""The second engine of the estimator: a training step's memory read off the graph that TensorFlow would run."""

from memory_estimator.replay.model import Replay, estimate_model, estimate_step

__all__ = ["Replay", "estimate_model", "estimate_step"]
