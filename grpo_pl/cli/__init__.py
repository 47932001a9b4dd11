"""The command line: verbs with a Trainer, verbs without one, and what mistakes print."""
