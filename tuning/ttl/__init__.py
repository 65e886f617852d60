"""A time-to-live for each group of blocks, from a trace and a budget of storage."""
