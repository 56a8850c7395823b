"""GPU kernels on raw arrays; nothing here imports the rest of the package."""
