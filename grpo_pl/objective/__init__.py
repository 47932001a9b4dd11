"""The training objective: its fields, the checks of contradictions, and the algorithm built on them."""
