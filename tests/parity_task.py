"""The training command with a grader whose rewards random weights can earn.

A module of its own: the grading processes import it by name.
"""

from fp8rl_jax.tasks.arithmetic import ArithmeticTask
from fp8rl_jax.tasks.base import Grade


def grade(example, completion, token_ids):
    """Rewards an even first token."""
    even = token_ids[0] % 2 == 0
    return Grade(float(even), even, {"length": float(len(token_ids))})


def run():
    """`fp8rl_jax.train` with this grader."""
    from fp8rl_jax import train

    ArithmeticTask.grade = staticmethod(grade)
    train.run()
