"""The disk tier of a node's store: one file an extent, within a byte limit."""
