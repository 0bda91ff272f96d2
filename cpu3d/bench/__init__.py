"""What is measured, a module a kind: steps, memory, engines, data, windows, workers, faults, the estimator."""
