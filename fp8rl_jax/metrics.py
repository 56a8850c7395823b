"""Metrics of a run: one JSON line per step, and TensorBoard.

Names are flat, with ``/`` between group and name as TensorBoard shows them:
``train/reward``, ``validation/accuracy``, ``timing/train/generation``. Where NeMo RL
has the metric, the name is NeMo RL's.
"""

import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.@-]+(/[\w.@-]+)*")
_RESERVED = ("phase", "step", "time")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricSink(Protocol):
    """Where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one step."""

    def close(self) -> None:
        """Flushes and frees the sink."""


class JsonlSink:
    """Appends to ``metrics.jsonl``: strict JSON, one object per line.

    Every line has ``phase``, ``step`` and ``time`` (seconds since the epoch) beside
    its metrics. Values that JSON has no number for are the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``; `read_metrics` turns them back. A line that
    cannot be written, as on a full disk, is a warning and is written with the next.

    Args:
      path: The file; lines of earlier phases stay.
      phase: Name of the part of the run that is writing, such as ``"grpo"``.
      resume_step: The last completed step. Lines of `phase` after it, and of phases
        after `phase`, are removed, so that no step stands there twice. None starts
        the phase afresh.

    Raises:
      ValueError: if an earlier line, other than a last one cut short, is not JSON.
    """

    def __init__(self, path: str | Path, phase: str, resume_step: int | None = None):
        self._phase = phase
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b") as file:
            file.truncate(_resume_offset(path, phase, resume_step))
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        line = {"phase": self._phase, "step": step, "time": round(time.time(), 3)}
        line |= {name: _json_value(value) for name, value in metrics.items()}
        self._pending += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._write_pending()

    def close(self) -> None:
        """Closes the file."""
        self._write_pending()
        self._file.close()

    def _write_pending(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            _log.warning("metrics wait to be written to %s: %s", self._file.name, error)


class TensorBoardSink:
    """Writes scalars for TensorBoard, each phase a run of its own.

    If they cannot be written, as on a full disk, it warns and writes no more.

    Args:
      directory: TensorBoard's log directory.
      phase: Name of the subdirectory.
      resume_step: The last completed step; what stands after it is hidden.
    """

    def __init__(
        self, directory: str | Path, phase: str, resume_step: int | None = None
    ):
        # Imported here: it takes a second that runs without it need not spend.
        from tensorboardX import SummaryWriter

        purge_step = 0 if resume_step is None else resume_step + 1
        # tensorboardX's thread ends at its first error. A queue with an end would then
        # block the run for ever.
        self._writer = SummaryWriter(
            str(Path(directory) / phase), purge_step=purge_step, max_queue=0
        )
        self._thread = self._writer.file_writer.event_writer._worker
        self._warned = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        if not self._works():
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._works():
            self._writer.close()

    def _works(self) -> bool:
        if not self._thread.is_alive() and not self._warned:
            self._warned = True
            _log.warning(
                "TensorBoard's files cannot be written (is the disk full?); "
                "metrics.jsonl goes on"
            )
        return not self._warned


class MetricWriter:
    """Checks metrics and passes them to the sinks.

    Args:
      sinks: Where to write; empty on processes other than the primary one.
      max_names: How many distinct names one run may have. Names made from data
        (one per problem, say) would otherwise grow without end.

    Raises:
      ValueError: if `max_names` is below 1.
    """

    def __init__(self, sinks: Sequence[MetricSink], max_names: int = 500):
        if max_names < 1:
            raise ValueError(f"max_names={max_names}: must be positive")
        self._sinks = tuple(sinks)
        self._max_names = max_names
        self._names: set[str] = set()
        self._last_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records everything about one step; call once per step.

        Args:
          step: Number of completed steps, larger than in the previous call.
          metrics: Flat name to number: a Python, numpy or JAX scalar.

        Raises:
          ValueError: if the step was written before, a name is malformed or
            reserved, a value is not a number, or there are too many names.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} after those of step {self._last_step}: "
                "write once per step, with all its metrics together"
            )
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        new = [name for name in numbers if name not in self._names]
        if len(self._names) + len(new) > self._max_names:
            raise ValueError(
                f"more than {self._max_names} metric names with {new[0]!r}: "
                "aggregate instead of naming by data"
            )
        self._names.update(new)
        self._last_step = step
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_metrics(
    run_dir: str | Path,
    phase: str,
    sinks: Sequence[str] = ("jsonl", "tensorboard"),
    resume_step: int | None = None,
) -> MetricWriter:
    """Opens the metrics of one phase of a run.

    Args:
      run_dir: Holds ``metrics.jsonl`` and ``tensorboard/``.
      phase: ``"warm_start"``, ``"grpo"``, ...
      sinks: Which of ``"jsonl"`` and ``"tensorboard"``.
      resume_step: The last completed step of a resumed phase, else None.

    Raises:
      ValueError: for an unknown sink, or a damaged ``metrics.jsonl``.
    """
    makers = {
        "jsonl": lambda: JsonlSink(Path(run_dir) / "metrics.jsonl", phase, resume_step),
        "tensorboard": lambda: TensorBoardSink(
            Path(run_dir) / "tensorboard", phase, resume_step
        ),
    }
    if unknown := [name for name in sinks if name not in makers]:
        raise ValueError(f"unknown metric sinks {unknown}; there are {list(makers)}")
    return MetricWriter([makers[name]() for name in sinks])


def read_metrics(path: str | Path, phase: str | None = None) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``.

    Args:
      path: The file.
      phase: Only lines of this phase, else of all.

    Returns:
      One dict per step, in the order written.

    Raises:
      ValueError: naming the first line that is not JSON, unless it is the last one
        and cut short.
    """
    lines = [line for _, line in _lines(Path(path))]
    return [line for line in lines if phase is None or line["phase"] == phase]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (offset of the first byte after the line, parsed line)."""
    end = 0
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            return  # Killed while writing: the step is not complete.
        end += len(raw)
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        yield (
            end,
            {
                name: value if name in _RESERVED else _NON_FINITE.get(value, value)
                for name, value in line.items()
            },
        )


def _resume_offset(path: Path, phase: str, resume_step: int | None) -> int:
    """Returns the length in bytes of what precedes the steps to be written."""
    keep, seen = 0, False
    for end, line in _lines(path):
        if line["phase"] == phase:
            seen = True
            if resume_step is None or line["step"] > resume_step:
                break
        elif seen:
            break
        keep = end
    return keep


def _number(name: str, value: Any) -> float:
    """Returns a metric as an int or float."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ValueError(
            f"metric name {name!r}: use letters, digits and _.@- with single slashes "
            f"between groups, and none of {_RESERVED}"
        )
    array = np.asarray(value)
    if array.ndim != 0 or array.dtype.kind in "OSU":
        raise ValueError(f"metric {name!r} is {value!r}, not one number")
    return int(array) if array.dtype.kind in "biu" else float(array)


def _json_value(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
