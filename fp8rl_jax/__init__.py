"""Reinforcement learning for Qwen3 in JAX with FP8 throughout."""

__version__ = "0.1.0"
