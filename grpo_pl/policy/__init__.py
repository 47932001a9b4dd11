"""The model being trained: loading, prompt template, scoring, cold start."""
