"""Hardware kernels on raw arrays; imports nothing else of this package."""
