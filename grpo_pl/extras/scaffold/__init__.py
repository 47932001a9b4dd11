"""Templates of a new task, and the reading of the user's data that fills them."""
