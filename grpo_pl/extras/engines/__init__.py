"""Engines and sources of rollouts of few runs: in processes of their own, ahead, in parts, vLLM, Ray."""
