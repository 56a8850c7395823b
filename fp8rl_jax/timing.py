"""Time per phase of a step, and memory in use."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import jax


class Timer:
    """Accumulates wall-clock seconds per phase.

    JAX returns before the devices are done: a phase that ends in device work should
    block on its results inside the `with`, or the next phase is charged for it.

    Example::

        timer = Timer()
        with timer.phase("total_step_time"):
            with timer.phase("generation"):
                rollouts = jax.block_until_ready(generate())
        metrics = timer.collect()  # {"timing/train/generation": ..., ...}

    Args:
      prefix: Put before the phase names; NeMo RL's by default.
      clock: Returns seconds.
    """

    def __init__(
        self,
        prefix: str = "timing/train/",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._prefix = prefix
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent in the context, whether or not it raises.

        Args:
          name: For example ``generation``, ``reward_calculation``,
            ``policy_training``, ``checkpointing`` or ``total_step_time``.
        """
        start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def collect(self) -> dict[str, float]:
        """Returns the seconds per phase since the last call, and starts afresh."""
        seconds, self._seconds = self._seconds, {}
        return {self._prefix + name: value for name, value in seconds.items()}


def memory_metrics() -> dict[str, int]:
    """Returns the peak memory so far, in bytes.

    ``memory/device_peak_bytes`` is the largest of this process's devices. Where the
    backend does not count (CPU), ``memory/host_peak_bytes`` is the process's peak
    resident set instead.
    """
    peak = _largest("peak_bytes_in_use")
    if peak is not None:
        return {"memory/device_peak_bytes": peak}
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage: KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory/host_peak_bytes": peak}


def phase_memory(phase: str) -> dict[str, int]:
    """Returns what a phase leaves in memory, and the peak so far; call at its end.

    JAX has no peak of a phase: ``memory/<phase>_peak_bytes`` is the highest since the
    start of the process, by the end of this phase. In a step where it exceeds the value
    of the phase before, it is this phase's own. ``memory/<phase>_bytes_in_use`` counts
    the arrays that are alive at the end; buffers of the phase's programs, and pages,
    are gone by then. Both are the largest of this process's devices.

    Args:
      phase: a name as of `Timer.phase`.

    Returns:
      The two, in bytes; nothing where the backend does not count (CPU).
    """
    in_use, peak = _largest("bytes_in_use"), _largest("peak_bytes_in_use")
    if in_use is None or peak is None:
        return {}
    return {f"memory/{phase}_bytes_in_use": in_use, f"memory/{phase}_peak_bytes": peak}


def _largest(name: str) -> int | None:
    """Of a statistic of this process's devices; None if none has it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((s[name] for s in stats if s and name in s), default=None)
