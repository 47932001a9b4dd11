"""The model that is trained: loading, prompt template, log-probabilities, adapters, exports."""
