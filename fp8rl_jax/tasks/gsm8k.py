r"""Grade-school mathematics in GSM8K's format.

A JSONL file with the fields `question` and `answer`; the answer is a worked solution
whose last line is `#### N`.

References:
  Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Literal

from fp8rl_jax.data.jsonl import numbered_rows, parse_object
from fp8rl_jax.data.tokenizer import Message, Tokenizer
from fp8rl_jax.tasks import graders
from fp8rl_jax.tasks.base import DatasetError, Example, Grade, render_prompt

INSTRUCTION = (
    "Solve the problem step by step. End with a line of the form '#### N', where N is "
    "the final number."
)
# GSM8K marks its calculations for a calculator: 48/2 = <<48/2=24>>24.
_CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class GSM8KConfig:
    """Where the data lie and how a question is put.

    Attributes:
      train_path: JSONL file of training problems.
      validation_path: JSONL file of held-out problems.
      prompt_format: `"chat"` sends one user message through the chat template;
        `"plain"` encodes the text as it is, for models without a template.
      instruction: Follows the question after an empty line.
    """

    train_path: str
    validation_path: str
    prompt_format: Literal["chat", "plain"] = "chat"
    instruction: str = INSTRUCTION

    def __post_init__(self):
        if self.prompt_format not in ("chat", "plain"):
            raise ValueError(
                f"prompt_format must be 'chat' or 'plain', got {self.prompt_format!r}"
            )


class GSM8KTask:
    """Word problems with a numeric answer.

    Args:
      config: Files and prompt.

    Raises:
      DatasetError: A file is missing, empty or has a malformed row.
    """

    name = "gsm8k"

    def __init__(self, config: GSM8KConfig):
        self.train_source = read_gsm8k(config.train_path, config)
        self.validation_source = read_gsm8k(config.validation_path, config)

    def render(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids of the prompt."""
        return render_prompt(example.prompt, tokenizer)

    def target(self, example: Example) -> str:
        """Returns the worked solution without its calculator marks."""
        return _CALCULATION.sub("", example.metadata["solution"])

    @staticmethod
    def grade(example: Example, completion: str, token_ids: Sequence[int]) -> Grade:
        """Grades the final number; see :func:`graders.grade_number`."""
        del token_ids
        return graders.grade_number(completion, example.answer)


def read_gsm8k(path: str | pathlib.Path, config: GSM8KConfig) -> list[Example]:
    """Reads a JSONL file of `question` and `answer`.

    Args:
      path: The file. Blank lines are skipped.
      config: How a question is put.

    Returns:
      One example a row, its id `<file stem>:<line number>`.

    Raises:
      DatasetError: Names the file and, for a malformed row, its line number.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: no such file: give a GSM8K-format JSONL file")
    examples = []
    for number, row in numbered_rows(path):
        try:
            examples.append(_parse_row(row, f"{path.stem}:{number}", config))
        except ValueError as e:
            raise DatasetError(
                f"{path}:{number}: {e}: correct or remove this row"
            ) from e
    if not examples:
        raise DatasetError(f"{path}: the file has no rows")
    return examples


def _parse_row(row: bytes, example_id: str, config: GSM8KConfig) -> Example:
    record = parse_object(row)
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"the field {key!r} is missing or not a text")
    solution = record["answer"].strip()
    _, marker, answer = solution.rpartition("####")
    if not marker or graders.parse_number(answer) is None:
        raise ValueError("the field 'answer' does not end with '#### <number>'")
    text = f"{record['question'].strip()}\n\n{config.instruction}"
    prompt = (
        text
        if config.prompt_format == "plain"
        else (Message(role="user", content=text),)
    )
    return Example(example_id, prompt, answer.strip(), {"solution": solution})
