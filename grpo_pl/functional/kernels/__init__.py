"""What GPUs compute in kernels of their own, in Triton."""
