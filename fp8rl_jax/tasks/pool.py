"""Grading in processes that can be killed.

Each worker is a fresh interpreter (:mod:`fp8rl_jax.tasks.worker`), started neither by
fork, which is unsafe once JAX runs threads, nor by multiprocessing's spawn, which would
import the main program, and JAX with it, in every worker.
"""

import collections
import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection

from fp8rl_jax.tasks.base import Example, Grade, Task
from fp8rl_jax.tasks.worker import failed

_STARTUP_TIMEOUT_S = 120.0
_MAX_FAILED_STARTS = 3
_MAX_CHUNK = 16

Sample = tuple[Example, str, Sequence[int]]


class GradingPool:
    """Grades completions in worker processes.

    A grader that raises, hangs, exits, exhausts its memory or returns something else
    than a finite Grade costs that sample alone: its grade has reward 0 and says why in
    `failure`. Workers that hang or die are replaced.

    Args:
      task: The task; its `grade` must be picklable and importable by name.
      num_workers: Processes to keep.
      timeout_s: Seconds that one sample may take.
      memory_limit_gib: Address space of one worker, on Linux; None for no limit.

    Attributes:
      num_failures: Samples that could not be graded so far.

    Raises:
      ValueError: A bad argument, or a grader defined in `__main__`.
    """

    def __init__(
        self,
        task: Task,
        num_workers: int,
        timeout_s: float,
        memory_limit_gib: float | None = 4.0,
    ):
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(
                "num_workers must be >= 1 and timeout_s > 0, got "
                f"{num_workers} and {timeout_s}"
            )
        if task.grade.__module__ == "__main__":
            raise ValueError(
                f"the grader of task {task.name!r} is defined in __main__, which the "
                "grading processes cannot import: move the task into a module"
            )
        self._grader = pickle.dumps(task.grade)
        self._timeout_s = timeout_s
        self._memory_limit = 0
        if memory_limit_gib is not None and sys.platform == "linux":
            self._memory_limit = int(memory_limit_gib * 2**30)
        self.num_failures = 0
        self._closed = False
        self._failed_starts = 0
        self._workers = [self._start() for _ in range(num_workers)]

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. The pool cannot be used afterwards."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Grades samples, in parallel.

        Args:
          samples: Triples of example, completion text and token ids.

        Returns:
          One grade a sample, in the order of the samples.

        Raises:
          RuntimeError: The grader cannot be loaded in a worker, workers end before
            they have started, three in a row, or the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the grading pool is closed")
        try:
            grades = self._grade(samples)
        except BaseException:
            # Answers to an abandoned call must not be taken for those of the next.
            for i, worker in enumerate(self._workers):
                if worker.pending:
                    self._replace(i)
            raise
        self.num_failures += sum(grade.failure is not None for grade in grades)
        return grades

    def _grade(self, samples: Sequence[Sample]) -> list[Grade]:
        grades: dict[int, Grade] = {}
        size = math.ceil(len(samples) / (4 * len(self._workers)))
        size = max(1, min(_MAX_CHUNK, size))
        chunks = collections.deque(
            range(i, min(i + size, len(samples))) for i in range(0, len(samples), size)
        )
        while len(grades) < len(samples):
            self._hand_out(chunks, samples)
            waiting = [w for w in self._workers if w.pending or not w.ready]
            due = min(w.deadline for w in waiting) - time.monotonic()
            readable = connection.wait(
                [w.connection for w in waiting], timeout=max(0.0, due)
            )
            for i, worker in enumerate(self._workers):
                if worker.connection in readable:
                    try:
                        self._receive(worker, grades)
                        continue
                    except (EOFError, OSError):
                        failure = "the grader ended its process"
                elif worker in waiting and time.monotonic() > worker.deadline:
                    failure = f"the grader took longer than {self._timeout_s:g} s"
                else:
                    continue
                if not worker.ready:
                    self._failed_starts += 1
                    if self._failed_starts == _MAX_FAILED_STARTS:
                        raise RuntimeError(
                            "grading processes do not start: their messages are on "
                            "stderr"
                        )
                else:
                    grades[worker.pending.popleft()] = failed(failure)
                    if worker.pending:
                        chunks.appendleft(worker.pending)
                self._replace(i)
        return [grades[i] for i in range(len(samples))]

    def _hand_out(
        self, chunks: collections.deque[Sequence[int]], samples: Sequence[Sample]
    ) -> None:
        for i, worker in enumerate(self._workers):
            if chunks and worker.ready and not worker.pending:
                try:
                    worker.connection.send([samples[j] for j in chunks[0]])
                except OSError:  # It died while idle: no sample is to blame.
                    self._replace(i)
                else:
                    worker.pending.extend(chunks.popleft())
                    worker.deadline = time.monotonic() + self._timeout_s

    def _receive(self, worker: "_Worker", grades: dict[int, Grade]) -> None:
        message = worker.connection.recv()
        if worker.ready:
            grades[worker.pending.popleft()] = message
            worker.deadline = time.monotonic() + self._timeout_s
        elif message is None:
            worker.ready = True
            self._failed_starts = 0
        else:
            raise RuntimeError(f"a grading process cannot load the grader:\n{message}")

    def _start(self) -> "_Worker":
        return _start_worker(self._grader, self._memory_limit)

    def _replace(self, index: int) -> None:
        self._workers[index].kill()
        self._workers[index] = self._start()


@dataclasses.dataclass(eq=False)
class _Worker:
    """A grading process and the samples it has been given.

    Attributes:
      process: The interpreter, leader of its own process group.
      connection: Our end of the socket.
      deadline: When the next message is due, on the monotonic clock.
      ready: Whether it has loaded the grader.
      pending: Indices of the samples it has not answered; the first is being graded.
    """

    process: subprocess.Popen[bytes]
    connection: connection.Connection
    deadline: float
    ready: bool = False
    pending: collections.deque[int] = dataclasses.field(
        default_factory=collections.deque
    )

    def kill(self) -> None:
        """Ends the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _start_worker(grader: bytes, memory_limit: int) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    # The worker finds the same modules as we do, and keeps off the accelerators.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(pathlib.Path(p).resolve()) for p in sys.path),
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "fp8rl_jax.tasks.worker"),
            *(str(theirs.fileno()), str(memory_limit)),
        ],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    theirs.close()
    with contextlib.suppress(OSError):  # Already dead: reading will tell.
        ours.send_bytes(grader)
    return _Worker(process, ours, time.monotonic() + _STARTUP_TIMEOUT_S)
