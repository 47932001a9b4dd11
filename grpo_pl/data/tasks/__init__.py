"""Tasks made up on the spot."""
