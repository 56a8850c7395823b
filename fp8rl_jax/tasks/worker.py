"""The process in which graders run: `python -m fp8rl_jax.tasks.worker <fd>`.

It talks to :class:`fp8rl_jax.tasks.pool.GradingPool` through an inherited socket: it
reads the pickled grader and answers None, or a traceback if the grader cannot be
loaded; then it reads lists of samples and answers each sample with a Grade.
"""

import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fp8rl_jax.tasks.base import Grade

# What a grade may carry home: a broken grader must not flood the training process.
_MAX_COMPONENTS = 64
_MAX_NAME = 100
_MAX_MESSAGE = 500


def main(fd: int, memory_limit: int) -> None:
    """Serves until the other end of the socket closes.

    Args:
      fd: File descriptor of the socket.
      memory_limit: Address space in bytes; 0 for no limit.
    """
    os.set_inheritable(fd, False)
    if memory_limit:
        import resource  # POSIX only.

        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    parent = os.getppid()
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    with Connection(fd) as connection:
        try:
            grade = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except BaseException:
            connection.send(traceback.format_exc())
            return
        connection.send(None)
        while True:
            try:
                samples = connection.recv()
            except EOFError:
                return
            for sample in samples:
                connection.send(_checked(grade, sample))


def _checked(grade: Callable[..., Grade], sample: tuple[Any, ...]) -> Grade:
    """Returns the grade in plain types, or the reason why there is none."""
    try:
        result = grade(*sample)
        if not isinstance(result, Grade):
            raise TypeError(f"the grader returned {type(result)}, not a Grade")
        if len(result.components) > _MAX_COMPONENTS:
            raise ValueError(f"the grade has over {_MAX_COMPONENTS} components")
        components = {
            str(name)[:_MAX_NAME]: float(value)
            for name, value in result.components.items()
        }
        values = (reward := float(result.reward), *components.values())
        if not all(map(math.isfinite, values)):
            raise ValueError("the reward or a component is not finite")
        failure = None if result.failure is None else str(result.failure)
        plain = Grade(reward, bool(result.correct), components, failure)
    except BaseException as e:  # Also SystemExit: nothing may end the worker.
        return failed(f"{type(e).__name__}: {e}")
    return plain if failure is None else failed(failure)


def failed(reason: str) -> Grade:
    """Returns the grade of a sample that could not be graded."""
    return Grade(reward=0.0, correct=False, failure=reason[:_MAX_MESSAGE])


def _exit_with(parent: int) -> None:
    """Ends a grader that hangs when the training process was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
