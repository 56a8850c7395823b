"""Where completions go: a file of one JSON object a line, or the terminal."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from fp8rl_jax.console import printable
from fp8rl_jax.jobs import Job
from fp8rl_jax.rollout import Completion

Decode = Callable[[Sequence[int]], str]


class Sink(contextlib.AbstractContextManager):
    """Takes completions; a context manager. This one drops them."""

    def on_tokens(
        self,
        request: int,
        sample: int,
        tokens: Int[np.ndarray, "T"],
        log_probs: Float[np.ndarray, "T"],
    ) -> None:
        """Takes tokens as they are drawn, for a session."""

    def add(self, job: int, completion: Completion) -> None:
        """Takes a completion of the prompt number ``job`` once it has ended."""

    def finish(self) -> None:
        """All completions have come."""

    def kept(self) -> str:
        """What there is if `finish` never comes."""
        return "Nothing has been written."

    def __exit__(self, *exception: object) -> None:
        pass


class CompletionPrinter(Sink):
    """Prints the completions of one prompt, in order.

    Args:
      decode: text of token ids.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._completions: list[Completion] = []

    def add(self, job: int, completion: Completion) -> None:
        """Keeps a completion."""
        self._completions.append(completion)

    def finish(self) -> None:
        """Prints them, under headings if there are several."""
        for completion in sorted(self._completions, key=lambda c: c.sample):
            if len(self._completions) > 1:
                reason = completion.finish_reason.name.lower()
                size = len(completion.tokens)
                print(f"--- sample {completion.sample}, {size} tokens, {reason}")
            _print_text(self._decode(completion.tokens.tolist()) + "\n")


class TextStream(Sink):
    """Prints a completion as its tokens are drawn.

    Args:
      decode: text of token ids.
      write: takes each new piece of text; prints by default.
    """

    def __init__(self, decode: Decode, write: Callable[[str], None] | None = None):
        self._decode = decode
        self._write = write or _print_text
        self._tokens: list[int] = []
        self._length = 0

    def on_tokens(self, request, sample, tokens, log_probs) -> None:
        """Prints the text that they complete."""
        self._tokens += tokens.tolist()
        # The bytes of a character may come with different tokens.
        self._show(self._decode(self._tokens).rstrip("\ufffd"))

    def kept(self) -> str:
        """Says nothing: the text is there."""
        return ""

    def __exit__(self, *exception: object) -> None:
        """Prints what is left and ends the line."""
        if self._tokens:
            self._show(self._decode(self._tokens))
            self._write("\n")

    def _show(self, text: str) -> None:
        if len(text) > self._length:
            self._write(text[self._length :])
            self._length = len(text)


class CompletionWriter(Sink):
    """Writes completions as they end, and in the order of their prompts at last.

    Until `finish`, lines lie in ``<path>.partial`` in the order in which completions
    ended, each whole; what stood under ``path`` before is untouched. Use as a context
    manager: if it is left early, that file stays, unless it is empty.

    Args:
      path: the file to create.
      jobs: the prompts, in order.
      decode: text of token ids.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        jobs: Sequence[Job],
        decode: Callable[[Sequence[int]], str],
    ):
        self.path = Path(path)
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._jobs = jobs
        self._decode = decode
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._file = self.partial.open("w+b")

    def add(self, job: int, completion: Completion) -> None:
        """Appends a completion of the prompt number ``job``.

        Raises:
          FloatingPointError: a log-prob is not finite.
        """
        record = {
            "id": self._jobs[job].id,
            "sample": completion.sample,
            "text": self._decode(completion.tokens.tolist()),
            "tokens": completion.tokens.tolist(),
            "log_probs": completion.log_probs.tolist(),
            "finish_reason": completion.finish_reason.name.lower(),
        }
        try:
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
        except ValueError as error:
            raise FloatingPointError(
                f"A log-prob of prompt {record['id']!r} is not finite: are the weights?"
            ) from error
        self._places[job, completion.sample] = (self._file.tell(), len(line))
        self._file.write(line)
        self._file.flush()

    def kept(self) -> str:
        """What there is if `finish` never comes."""
        if not self._places:
            return "Nothing has been written."
        return (
            f"The {len(self._places)} completions that had ended are in {self.partial}."
        )

    def finish(self) -> None:
        """Puts the lines in order, under the file's own name."""
        ordered = self.path.with_name(f"{self.path.name}.sorted")
        with ordered.open("wb") as file:
            for _, (start, length) in sorted(self._places.items()):
                self._file.seek(start)
                file.write(self._file.read(length))
            file.flush()
            os.fsync(file.fileno())
        ordered.replace(self.path)
        self._file.close()
        self.partial.unlink()

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if not self._places:
            with contextlib.suppress(FileNotFoundError):
                self.partial.unlink()


def _print_text(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
