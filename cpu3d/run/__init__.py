"""A run's folder: settings, log, checkpoints, heartbeats."""
