"""What is optimised: the fields of the objective, what contradicts what, and the algorithm built on them."""
