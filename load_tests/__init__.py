"""Load generation, comparisons and their committed results."""
