"""What completions of held-out problems are worth, with intervals, in every verb alike."""
