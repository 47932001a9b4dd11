"""Pure functions on tensors and numbers: no state, no logging, no I/O."""
