"""Several processes: the exchanges between them, how they share a policy, and checkpoints."""
