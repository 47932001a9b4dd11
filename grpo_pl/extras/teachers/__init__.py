"""Models that the policy learns from besides its rewards."""
