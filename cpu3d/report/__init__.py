"""One page of a run; `status`; `view`."""
