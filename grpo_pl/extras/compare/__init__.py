"""One configuration under several algorithms."""
