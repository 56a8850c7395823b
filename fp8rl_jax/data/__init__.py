"""Tokenizers, prompt order and padding."""
