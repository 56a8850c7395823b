"""Prompts to complete, from a file of one JSON object a line."""

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8rl_jax.data.jsonl import numbered_rows, parse_object
from fp8rl_jax.data.tokenizer import Message, Tokenizer, TokenizerError
from fp8rl_jax.rollout import Request, SamplingParams
from fp8rl_jax.tasks.base import render_prompt

_PROMPTS = ("prompt", "messages", "tokens")
_SAMPLING = ("num_samples", "max_new_tokens", "temperature")
_FIELDS = (*_PROMPTS, "id", *_SAMPLING)


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt to complete.

    Attributes:
      id: names it in the output.
      request: what the engine is asked for.
    """

    id: str | int
    request: Request


@dataclasses.dataclass(frozen=True)
class JobReader:
    """Makes jobs of JSON objects.

    Attributes:
      tokenizer: text to ids.
      sampling: how completions are drawn where a prompt does not say.
      max_length: tokens that a prompt and its completion may have together.
      raw: whether a text is the prompt as it is, rather than a user's message.
    """

    tokenizer: Tokenizer
    sampling: SamplingParams
    max_length: int
    raw: bool = False

    def read(self, path: str | Path) -> list[Job]:
        """Reads a file of prompts. Blank lines are skipped.

        Raises:
          ValueError: no such file, no prompts, or the first bad line, by number.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file: give prompts, one object a line")
        jobs, lines = [], {}
        for number, row in numbered_rows(path):
            try:
                job = self.job(parse_object(row), number)
                if job.id in lines:
                    raise ValueError(f"line {lines[job.id]} has the id {job.id!r} too")
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number}: {error}: correct or remove this line"
                ) from error
            lines[job.id] = number
            jobs.append(job)
        if not jobs:
            raise ValueError(f"{path}: the file has no prompts")
        return jobs

    def job(self, record: Mapping[str, Any], default_id: str | int) -> Job:
        """Checks one object.

        Args:
          record: `prompt`, `messages` or `tokens`; perhaps `id` and sampling options.
          default_id: the id if it has none.

        Raises:
          ValueError: what is wrong with it.
        """
        if unknown := sorted(record.keys() - {*_FIELDS}):
            raise ValueError(
                f"unknown field {unknown[0]!r}, there are {', '.join(_FIELDS)}"
            )
        name = record.get("id", default_id)
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise ValueError(f"the id {name!r} is neither a text nor an integer")
        changes = {key: record[key] for key in _SAMPLING if key in record}
        _check_numbers(changes)
        sampling = dataclasses.replace(self.sampling, **changes)
        prompt = self._prompt(record)
        length = len(prompt) + sampling.max_new_tokens
        if length > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens="
                f"{sampling.max_new_tokens} exceed the model's {self.max_length} "
                "positions"
            )
        ids = sample_ids(name, sampling.num_samples)
        return Job(name, Request(prompt, sampling, ids))

    def _prompt(self, record: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt of an object."""
        given = [name for name in _PROMPTS if name in record]
        if len(given) != 1:
            raise ValueError(f"it needs one of {', '.join(_PROMPTS)}, and has {given}")
        value = record[given[0]]
        if given == ["tokens"]:
            _check_tokens(value, self.tokenizer.vocab_size)
            return value
        if given == ["messages"]:
            return self._chat(_messages(value))
        if not isinstance(value, str):
            raise ValueError(f"the prompt {value!r} is not a text")
        if self.raw:
            return render_prompt(value, self.tokenizer)
        return self._chat((Message(role="user", content=value),))

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        try:
            return render_prompt(messages, self.tokenizer)
        except TokenizerError as error:
            raise ValueError(f"{error} (--raw)") from error
        except Exception as error:  # A template may raise anything.
            raise ValueError(f"the chat template fails ({error})") from error


def sample_ids(name: str | int, count: int) -> tuple[int, ...]:
    """Ids of the samples of a prompt, a function of its name.

    So a prompt's completions depend neither on the others nor on its place.
    """
    first = zlib.crc32(json.dumps(name).encode())
    return tuple((first + i) % 2**31 for i in range(count))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_numbers(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name == "temperature":
            number = _is_integer(value) or isinstance(value, float)
            if not number or not math.isfinite(value):
                raise ValueError(f"temperature {value!r} is not a number")
        elif not _is_integer(value):
            raise ValueError(f"{name} {value!r} is not an integer")


def _check_tokens(value: Any, vocab_size: int) -> None:
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise ValueError("tokens is not a list of integers")
    if bad := [i for i in value if not 0 <= i < vocab_size]:
        raise ValueError(f"token {bad[0]} is not among the tokenizer's {vocab_size}")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages is not a list of turns")
    for turn in value:
        if (
            not isinstance(turn, dict)
            or turn.keys() != {"role", "content"}
            or not all(isinstance(text, str) for text in turn.values())
        ):
            raise ValueError(f"the turn {turn!r} is not a role and a content")
    return value
