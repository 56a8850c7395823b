"""Arithmetic on small integers: `7+15=` is answered by `22`, `3+4+5=` by `12`."""

import dataclasses
import functools
import itertools
import operator
import random
from collections.abc import Sequence

from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.tasks.base import Example, Grade, render_prompt

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclasses.dataclass(frozen=True)
class Level:
    """A difficulty level: every choice of operands from 0 to `max_operand`.

    Attributes:
      operators: Any of `+`, `-` and `*`. With more than two operands one operator
        stands between all of them.
      max_operand: The largest operand.
      num_operands: Operands of a problem.
    """

    operators: str = "+"
    max_operand: int = 19
    num_operands: int = 2

    def __post_init__(self):
        if not self.operators or set(self.operators) - set(_OPERATIONS):
            raise ValueError(f"operators must be among '+-*', got {self.operators!r}")
        if self.max_operand < 0:
            raise ValueError(f"max_operand must be >= 0, got {self.max_operand}")
        if self.num_operands < 2:
            raise ValueError(f"num_operands must be >= 2, got {self.num_operands}")


@dataclasses.dataclass(frozen=True)
class ArithmeticConfig:
    """Which problems there are and which of them are held out.

    Attributes:
      levels: Difficulty levels, the easiest first. A problem that several levels
        share belongs to the first.
      num_validation: Problems held out from training, drawn at random.
      hold_out_commuted: Whether `a+b` and `b+a` (and products) are always on the same
        side of the split, so that no held-out sum is seen in training in another
        order. The held-out count may then be a little larger than asked for.
      seed: Of the split.
    """

    levels: tuple[Level, ...] = (Level(),)
    num_validation: int = 200
    hold_out_commuted: bool = True
    seed: int = 0


class ArithmeticTask:
    """Integer arithmetic with a random, disjoint held-out set.

    Args:
      config: The problems and their split.

    Raises:
      ValueError: The levels hold too few problems for the split.
    """

    name = "arithmetic"

    def __init__(self, config: ArithmeticConfig = ArithmeticConfig()):
        self.train_source, self.validation_source = _split(config)

    def render(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids of the prompt."""
        return render_prompt(example.prompt, tokenizer)

    def target(self, example: Example) -> str:
        """Returns the answer: the text to imitate in a supervised warm start."""
        return example.answer

    @staticmethod
    def grade(example: Example, completion: str, token_ids: Sequence[int]) -> Grade:
        """Returns reward 1 for exactly the digits of the answer, else 0."""
        del token_ids
        correct = completion.strip() == example.answer
        return Grade(reward=float(correct), correct=correct)


def _split(config: ArithmeticConfig) -> tuple[list[Example], list[Example]]:
    problems: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, level in enumerate(config.levels):
        choices = range(level.max_operand + 1)
        for op in level.operators:
            for operands in itertools.product(choices, repeat=level.num_operands):
                problems.setdefault((op, operands), index)
    if not 0 < config.num_validation < len(problems) - 1:
        raise ValueError(
            f"cannot hold out {config.num_validation} of {len(problems)} problems: "
            "lower num_validation or raise max_operand"
        )
    # Problems with the same key stay together, so the two sides are disjoint.
    groups: dict[tuple[str, tuple[int, ...]], list[Example]] = {}
    for (op, operands), index in problems.items():
        commutes = config.hold_out_commuted and op in "+*"
        key = (op, tuple(sorted(operands)) if commutes else operands)
        groups.setdefault(key, []).append(_example(op, operands, index))
    keys = sorted(groups)
    random.Random(config.seed).shuffle(keys)
    train, validation = [], []
    for key in keys:
        side = validation if len(validation) < config.num_validation else train
        side.extend(groups[key])
    return train, validation


def _example(op: str, operands: tuple[int, ...], level: int) -> Example:
    problem = op.join(map(str, operands))
    answer = str(functools.reduce(_OPERATIONS[op], operands))
    return Example(problem, f"{problem}=", answer, {"level": level})
