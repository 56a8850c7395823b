"""The Task contract: what a task provides to the training loop."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fp8rl_jax.data.tokenizer import Message, Tokenizer


class DatasetError(ValueError):
    """Data on disk that cannot be used; names the file, the line and the cause."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
      id: Identifies the problem within its task.
      prompt: Plain text, or the messages of a chat.
      answer: The reference answer, in the form that the task's grader expects.
      metadata: Anything else worth keeping, such as a difficulty level.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Grade:
    """The verdict on one completion.

    Attributes:
      reward: What the policy is trained on; may be shaped.
      correct: The raw verdict, whatever the shaping; accuracy is its mean.
      components: Named parts of the reward and other quantities to average and
        report.
      failure: Why the grader gave no verdict, or None. A failed grade
        has reward 0 and is not correct.
    """

    reward: float
    correct: bool
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: str | None = None


class Source(Protocol):
    """A random-access sequence of examples: a list will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@runtime_checkable
class Task(Protocol):
    """A source of problems and the judge of their answers.

    `grade` runs in worker processes (:class:`fp8rl_jax.tasks.pool.GradingPool`), so
    it must be picklable: a method of a class, or a function, in an importable
    module. Make it a `staticmethod` if the task object is large.
    """

    name: str
    train_source: Source
    validation_source: Source

    def render(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids of the prompt."""
        ...

    def grade(
        self, example: Example, completion: str, token_ids: Sequence[int]
    ) -> Grade:
        """Judges a completion.

        Args:
          example: The problem.
          completion: The decoded completion, special tokens left out.
          token_ids: The sampled ids, the stop token included.

        Returns:
          The grade. An exception counts as a failure of this sample alone.
        """
        ...


@runtime_checkable
class SupervisedTask(Task, Protocol):
    """A task whose problems come with a text to imitate."""

    def target(self, example: Example) -> str:
        """Returns a model completion, without the stop token."""
        ...


def render_prompt(prompt: str | Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a plain text, or of a chat through its template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt)
