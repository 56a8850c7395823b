"""Stopping a run politely: SIGTERM or Ctrl-C, then save and exit."""

import logging
import signal
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

_log = logging.getLogger(__name__)


class PreemptionGuard:
    """Turns the first SIGTERM or SIGINT into a flag while the context is open.

    The loop asks `should_stop` between steps, saves a checkpoint and exits with
    status 0. A second SIGINT interrupts at once, as without a guard.

    Example::

        with PreemptionGuard() as guard:
            for step in range(steps):
                train(step)
                if guard.should_stop():
                    checkpointer.save(...)
                    break

    Must be entered in the main thread, where Python delivers signals.

    Args:
      message: What the first signal makes known.
    """

    def __init__(self, message: str = "stopping after this step, with a checkpoint"):
        self.requested = False
        self._message = message
        self._previous = {}

    def should_stop(self) -> bool:
        """Returns whether a signal arrived, at this process or any other.

        With several processes this is a collective: all call it at the same step,
        so all stop after the same one.
        """
        if jax.process_count() == 1:
            return self.requested
        return bool(multihost_utils.process_allgather(np.array(self.requested)).any())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        _log.warning("%s: %s", signal.Signals(number).name, self._message)

    def __enter__(self) -> "PreemptionGuard":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
