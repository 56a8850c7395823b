"""Updates skipped because something was not finite: counted, and their batches kept."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

_MAX_FILES = 3


class SkippedUpdates:
    """Counts the updates that a run skips and writes down what they were made of.

    A batch goes to ``step_N.npz``: arrays by name, and ``metrics``, a JSON text. The
    newest three files stay.

    Args:
      folder: Where the batches go; made when there is one.
      max_steps_in_a_row: So many steps in a row that skip an update are too many;
        at least 1.
      writes: Whether this process writes the batches.

    Attributes:
      total: Optimiser steps skipped so far. A resumed run sets it to its checkpoint's.
    """

    def __init__(
        self, folder: str | Path, max_steps_in_a_row: int, writes: bool = True
    ):
        self.total = 0
        self._in_a_row = 0
        self._folder = Path(folder)
        self._max = max_steps_in_a_row
        self._writes = writes

    def applied(self) -> None:
        """Notes a step of which every update was applied."""
        self._in_a_row = 0

    def skipped(
        self,
        step: int,
        count: int,
        cause: str,
        batch: Mapping[str, Any],
        metrics: Any,
    ) -> None:
        """Notes a step that skipped updates, keeps its batch and warns.

        Args:
          step: Which one, from 1.
          count: Its updates that were skipped.
          cause: What was not finite, for the warning.
          batch: Arrays and lists of strings by name; None is left out.
          metrics: JSON values, NaN allowed.
        """
        self.total += count
        self._in_a_row += 1
        kept = "its batch is not kept by this process"
        if self._writes:
            path = self._folder / f"step_{step}.npz"
            try:
                self._write(path, batch, metrics)
                kept = f"its batch is in {path}"
            except OSError as error:  # A full disk is no reason to stop either.
                kept = f"its batch could not be written: {error}"
        _log.warning(
            "Step %d skipped %d update(s), %d step(s) in a row: %s; %s",
            step,
            count,
            self._in_a_row,
            cause,
            kept,
        )

    def too_many(self) -> bool:
        """Returns whether the run should stop."""
        return self._in_a_row >= self._max

    def error(self, step: int) -> FloatingPointError:
        """Returns what a run ends with that stops after ``step``, which is saved."""
        return FloatingPointError(
            f"The last {self._in_a_row} step(s) skipped updates because their loss, "
            f"gradient or sampled log-probs were not finite. Step {step} is saved; the "
            f"batches are in {self._folder}. The same command goes on with the next "
            "batch; train.max_skipped_updates is how many are borne."
        )

    def _write(self, path: Path, batch: Mapping[str, Any], metrics: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.asarray(x) for name, x in batch.items() if x is not None}
        # Renamed when complete. The suffix keeps a part out of the pattern below.
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez_compressed(file, metrics=json.dumps(metrics), **arrays)
        part.replace(path)
        # By age: a resumed run writes earlier steps after later ones.
        files = sorted(
            self._folder.glob("step_*.npz"),
            key=lambda p: (p.stat().st_mtime_ns, int(p.stem[5:])),
        )
        for old in files[:-_MAX_FILES]:
            old.unlink()
