"""Qwen3: configuration, forward pass, initialisation, Hugging Face files."""
