"""Search for configurations that nothing beats: which points to evaluate, and what was found."""
