"""Training in several processes: exchanges between ranks, sharding of the policy, and checkpoints."""
