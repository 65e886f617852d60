"""From a point of a search to a deployment, its simulation, and what it is worth."""
