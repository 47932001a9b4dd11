"""Pure tensor math: tensors and floats in, tensors and statistics out; no state, no logging, no I/O."""
