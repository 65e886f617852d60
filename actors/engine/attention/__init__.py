"""Attention over pages, behind one interface; each KV head is a row of the batch (design decision D2)."""
