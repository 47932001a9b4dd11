"""What hinders learning: figures of a run's problems, rewards and first rollouts, and the rules that judge them."""
