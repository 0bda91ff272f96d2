"""Data-parallel training on several hosts, predicted from one worker's step, its gradients and a network."""
