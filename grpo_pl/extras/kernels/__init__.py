"""Kernels in C for CPUs and in Triton for GPUs; the core finds them by `grpo_pl.functional.accelerated`."""
