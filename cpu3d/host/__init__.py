"""The host, the threads and cards that a run takes of it, `doctor`."""
