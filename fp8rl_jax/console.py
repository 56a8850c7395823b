"""What a person sees of a run: progress, sample completions, tables."""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fp8rl_jax.parallel.start import is_primary
from fp8rl_jax.rollout import Completion, Session

DEFAULT_COLUMNS = {
    "reward": "train/reward",
    "accuracy": "validation/accuracy",
    "tok/s": "performance/tokens_per_sec",
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion to show."""

    prompt: str
    completion: str
    reward: float


def say(text: str) -> None:
    """Prints a line for the user, on the primary process alone."""
    if is_primary():
        print(text, flush=True)


class Reporter:
    """Shows progress: a live bar on a terminal, otherwise one line per step.

    Use as a context manager around the loop; print through its methods inside.

    Args:
      total_steps: Step at which the run ends.
      label: Shown before the step, such as ``"grpo"``.
      columns: Label to metric name. A metric absent from a step keeps the value it
        had last: validation does not happen every step.
      console: Where to print; the primary process's stdout by default.
    """

    def __init__(
        self,
        total_steps: int,
        label: str = "step",
        columns: Mapping[str, str] | None = None,
        console: Console | None = None,
    ):
        if console is None:
            console = Console(quiet=not is_primary())
        self.console = console
        self._total = total_steps
        self._label = label
        self._columns = dict(DEFAULT_COLUMNS if columns is None else columns)
        self._values: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=20)
        self._last_time: float | None = None
        self._progress = _bar(self.console)
        self._task = self._progress.add_task(label, total=total_steps, values="")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows one completed step.

        Args:
          step: Number of completed steps.
          metrics: Flat metrics of the step.
        """
        now = time.monotonic()
        if self._last_time is not None:
            self._durations.append(now - self._last_time)
        self._last_time = now
        for label, name in self._columns.items():
            if name in metrics:
                self._values[label] = float(metrics[name])
        parts = [f"{label} {_short(value)}" for label, value in self._values.items()]
        if self._durations:
            # The median: a step that compiles or validates is not typical.
            left = statistics.median(self._durations) * max(self._total - step, 0)
            parts.append(f"ETA {_duration(left)}")
        values = "  ".join(parts)
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, values=values)
        else:
            line = f"{self._label} {step}/{self._total}  {values}"
            self.console.print(Text(line), soft_wrap=True)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Prints completions with their prompts and rewards."""
        for sample in samples:
            body = Text.assemble(
                (printable(sample.prompt), "dim"), printable(sample.completion)
            )
            title = f"reward {_short(sample.reward)}"
            self.console.print(Panel(body, title=title, title_align="left"))

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


class RolloutProgress:
    """Shows how far sampling is: a live bar on a terminal, otherwise a line at times.

    Use as a context manager, and call it after every step::

        with RolloutProgress(num_samples) as progress:
            while session.has_work:
                progress(session, session.step())

    Args:
      total: Completions to come.
      console: Where to print; stderr by default, so that stdout has completions alone.
      interval: Seconds between two lines, at least.
    """

    def __init__(
        self, total: int, console: Console | None = None, interval: float = 10.0
    ):
        self.console = Console(stderr=True) if console is None else console
        self._total = total
        self._interval = interval
        self._done = 0
        self._last_line = time.monotonic()
        # Time, tokens drawn and tokens that all slots could have drawn.
        self._history: deque[tuple[float, float, float]] = deque(maxlen=20)
        self._progress = _bar(self.console)
        self._task = self._progress.add_task("samples", total=total, values="")

    def __call__(self, session: Session, completions: Sequence[Completion] = ()):
        """Shows one step, also as ``on_step`` of `Session.run`.

        Args:
          session: After the step.
          completions: That ended in it.
        """
        self._done += len(completions)
        now = time.monotonic()
        metrics = session.metrics()
        tokens = metrics["rollout/generated_tokens"]
        self._history.append((now, tokens, tokens / (metrics["rollout/slot_use"] or 1)))
        slots = session.capacity.num_slots * session.capacity.num_shards
        if self.console.is_terminal:
            self._progress.update(
                self._task, completed=self._done, values=self._values(slots)
            )
        elif now - self._last_line >= self._interval:
            self._last_line = now
            line = f"samples {self._done}/{self._total}  {self._values(slots)}"
            self.console.print(Text(line), soft_wrap=True)

    def _values(self, slots: int) -> str:
        """Speed and slots in use over the last steps."""
        seconds, tokens, possible = (
            last - first
            for first, last in zip(self._history[0], self._history[-1], strict=True)
        )
        if not seconds or not possible:
            return ""
        in_use = round(slots * tokens / possible)
        return f"tok/s {_short(tokens / seconds)}  slots {in_use}/{slots}"

    def __enter__(self) -> "RolloutProgress":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


def print_table(
    rows: Sequence[Mapping[str, str | float]],
    title: str = "",
    console: Console | None = None,
) -> None:
    """Prints rows that share their columns.

    Args:
      rows: Column name to cell; floats are shortened to four digits.
      title: Shown above.
      console: Where to print; stdout by default.

    Raises:
      ValueError: if there are no rows or their columns differ.
    """
    columns = list(rows[0]) if rows else []
    if not columns or any(list(row) != columns for row in rows):
        raise ValueError(f"a table needs rows with the same columns, got {rows}")
    table = Table(title=Text(title) if title else None, title_justify="left")
    numeric = {name for name in columns if not isinstance(rows[0][name], str)}
    for name in columns:
        table.add_column(Text(name), justify="right" if name in numeric else "left")
    for row in rows:
        table.add_row(
            *(Text(v if isinstance(v, str) else _short(v)) for v in row.values())
        )
    (Console() if console is None else console).print(table)


def printable(text: str) -> str:
    """Returns text with its control characters escaped.

    A policy samples any bytes, terminal escape sequences among them.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _bar(console: Console) -> Progress:
    """A bar with a count and ``values``; nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}", markup=False),
        console=console,
        disable=not console.is_terminal,
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
