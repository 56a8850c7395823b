"""Measured kernel configurations by shape, kept as data beside the kernels.

``<kernel>.json`` is a list of entries ``{"m", "n", "k", "config"}`` that ``python -m
benchmarks.gemm --tune`` writes. A configuration changes the speed of a
kernel only, so a table from another card is safe to use.
"""

import functools
import json
from importlib import resources
from typing import Any

_SMALLEST_BUCKET, _LARGEST_BUCKET = 64, 8192


def bucket(m: int) -> int:
    """The power of two, from 64 to 8,192, that stands for ``m`` rows in the table."""
    up = 1 << max(m - 1, 1).bit_length()
    return min(max(up, _SMALLEST_BUCKET), _LARGEST_BUCKET)


@functools.cache
def _table(kernel: str) -> dict[tuple[int, int, int], dict[str, Any]]:
    path = resources.files(__package__) / f"{kernel}.json"
    entries = json.loads(path.read_text())
    return {(e["m"], e["n"], e["k"]): e["config"] for e in entries}


def lookup(kernel: str, m: int, n: int, k: int) -> dict[str, Any] | None:
    """The configuration measured for a product of that shape; None if there is none.

    Args:
      kernel: name of the table.
      m: rows; rounded up to their :func:`bucket`.
      n: columns.
      k: contracted length.
    """
    return _table(kernel).get((bucket(m), n, k))
