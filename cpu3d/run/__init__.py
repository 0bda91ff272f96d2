"""A run's folder: log, checkpoints, heartbeats."""
