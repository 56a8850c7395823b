r"""Grading of numeric answers.

Where the answer is looked for, in this order; within each the last one wins:

1. `#### N`: a `####` with a number right behind it (others are Markdown headings);
2. a balanced `\boxed{...}`; if boxes are opened and none is closed, there is no answer;
3. `Answer: ...`, on a line with a number;
4. the last number of the text.

A marker whose content is not one number (a list, an expression) makes the answer wrong:
the search does not go on. Only text after `</think>` counts; thinking that never ends
has no answer. How numbers are read and compared: :mod:`fp8rl_jax.tasks.numeric`.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

from fp8rl_jax.tasks import numeric
from fp8rl_jax.tasks.base import Grade
from fp8rl_jax.tasks.numeric import parse_number

MAX_CHARS = 400_000  # About 100K tokens; longer completions are wrong unread.

_HASHES = re.compile(r"(?<!#)####(?!#)")
_NUMBER_FIRST = re.compile(
    r"[^0-9A-Za-z]{0,16}(?:[A-Za-z]\s?=[^0-9A-Za-z]{0,16})?[0-9]"
)
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\[{}]|(?P<brace>[{}])")
_ANSWER = re.compile(r"answer(?:\sis)?[*_ ]{0,4}[:：]\s*", re.IGNORECASE)


class Answer(NamedTuple):
    """A final answer: its value, None if it is not a number, and where it stood."""

    value: Fraction | None
    marker: Literal["####", "boxed", "answer", "last_number", "none"]


def find_answer(completion: str) -> Answer:
    """Returns the final answer of a completion; never raises."""
    if len(completion) > MAX_CHARS:
        return Answer(None, "none")
    _, closed, text = completion.rpartition("</think>")
    if not closed and "<think>" in completion:
        return Answer(None, "none")
    for line in _lines_after(_HASHES, text):
        if _NUMBER_FIRST.match(numeric.normalize(line)):
            return Answer(parse_number(line), "####")
    if "\\boxed" in text and (box := _last_box(text)) is not None:
        return Answer(parse_number(box), "boxed")
    for line in _lines_after(_ANSWER, text):
        if re.search("[0-9]", line):
            return Answer(parse_number(line), "answer")
    value = numeric.last_number(text)
    return Answer(value, "none" if value is None else "last_number")


def grade_number(completion: str, answer: str) -> Grade:
    """Grades a completion by its final number.

    Args:
      completion: The decoded completion.
      answer: The reference answer.

    Returns:
      Reward 1 if the numbers are equal, else 0. Components: `answer_found`, whether
      there was a number; `answer_marked`, whether a marker introduced it.

    Raises:
      ValueError: The reference answer is not a number.
    """
    expected = parse_number(answer)
    if expected is None:
        raise ValueError(f"the reference answer {answer!r} is not a number")
    found = find_answer(completion)
    correct = found.value == expected
    has_value = found.value is not None
    return Grade(
        reward=float(correct),
        correct=correct,
        components={
            "answer_found": float(has_value),
            "answer_marked": float(has_value and found.marker != "last_number"),
        },
    )


def _lines_after(marker: re.Pattern[str], text: str) -> Iterator[str]:
    """Yields what follows each marker on its line, the last marker first."""
    for segment in reversed(marker.split(text)[1:]):
        yield segment.split("\n", 1)[0]


def _last_box(text: str) -> str | None:
    """Returns the content of the box closed last, "" if none of those opened is.

    None means that no box was opened.
    """
    content, opened, stack = "", False, []
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened = True
            stack.append((match.end(), True))
        elif match["brace"] == "{":
            stack.append((match.end(), False))
        elif match["brace"] == "}" and stack:
            start, is_box = stack.pop()
            if is_box:
                content = text[start : match.start()]
    return content if opened else None
