"""Metrics of held-out problems with intervals, the same in every verb."""
