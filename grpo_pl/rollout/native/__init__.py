"""The native engine: an own decode loop for the Llama family."""
