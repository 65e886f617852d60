"""Links between workers that have work for each other."""
