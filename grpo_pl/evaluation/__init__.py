"""Metrics of held-out problems with confidence intervals, the same for every verb of the command line."""
