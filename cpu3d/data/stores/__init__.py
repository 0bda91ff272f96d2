"""What becomes a store and what looks after it: layouts of data sets, splits, `prepare`, `phantom`, `store`."""
