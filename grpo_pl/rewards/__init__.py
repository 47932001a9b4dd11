"""Rewards: strings in, scores out; importing this package does not import torch."""
