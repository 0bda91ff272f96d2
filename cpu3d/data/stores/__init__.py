"""Making and keeping a store: layouts of data sets, splits, `prepare`, `phantom`, `store`."""
