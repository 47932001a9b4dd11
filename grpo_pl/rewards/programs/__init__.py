"""Programs that the policy writes: found in the text, run against tests, compared where they cannot reach."""
