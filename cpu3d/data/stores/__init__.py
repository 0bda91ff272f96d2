"""Making and keeping a store: `prepare`, its splits, its decisions, `store`."""
