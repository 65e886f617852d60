"""Layers of one worker's instance on another: run there over links, moved there and home again while it serves."""
