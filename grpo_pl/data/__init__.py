"""Sources of prompts, and the data module that feeds them to a run."""
