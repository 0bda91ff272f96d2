"""What becomes a store and what looks after it: layouts of data sets, `prepare`, `phantom`, `store`."""
