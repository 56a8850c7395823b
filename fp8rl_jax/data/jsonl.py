"""Files of one JSON object a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def numbered_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a file that are not blank, each with its number, from 1 on."""
    # Only "\n" ends a JSONL row: str.splitlines would also cut at U+2028.
    rows = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, row in enumerate(rows, start=1):
        if row.strip():
            yield number, row


def parse_object(row: bytes) -> dict[str, Any]:
    """The object of a row.

    Raises:
      ValueError: it is not UTF-8, not JSON or not an object.
    """
    try:
        record = json.loads(row.decode())
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 ({e})") from e
    except (json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"not JSON ({e})") from e
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record
