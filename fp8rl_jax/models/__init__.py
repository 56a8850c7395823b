"""Models, each with its configuration, forward pass and checkpoints."""
