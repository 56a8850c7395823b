"""Skips this folder where there is no Hopper GPU."""

import jax
import pytest


def _hopper() -> bool:
    device = jax.devices()[0]
    return (
        device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    )


def pytest_collection_modifyitems(items):
    reason = f"needs a Hopper GPU, the default device is {jax.devices()[0]}"
    for item in items:
        if "tests/gpu/" in str(item.path) and not _hopper():
            item.add_marker(pytest.mark.skip(reason=reason))
