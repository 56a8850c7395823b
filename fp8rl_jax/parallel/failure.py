"""One process's failure is the run's: the others end, and say what to do."""

import contextlib
import faulthandler
import os
import subprocess
from collections.abc import Iterator

import jax

# Seconds that a failed process may take to write its last files and its error.
_GRACE_S = 15
# `read` fails when the pipe closes unwritten, however its writer died.
_WATCH = 'read released || echo "$0" >&2'


class LastWords:
    """A child process that prints a message once this process has ended.

    `jax.distributed` aborts a process without leaving Python a word, and so does
    the kernel when memory runs out.

    Args:
      message: What to print on stderr, after all else, unless released.
    """

    def __init__(self, message: str):
        # Not a file object, which would close with the last reference to it.
        read_end, self._write_end = os.pipe()
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, message],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it.
        )
        os.close(read_end)

    def release(self) -> None:
        """Ends the child; nothing is printed."""
        with contextlib.suppress(BrokenPipeError):  # It was killed.
            os.write(self._write_end, b"released\n")
        os.close(self._write_end)
        self._child.wait()


@contextlib.contextmanager
def ending_together(remedy: str) -> Iterator[None]:
    """Ends this process soon if its work fails, so that the others end too.

    They wait for it in a collective meanwhile; `jax.distributed` ends them when the
    connection breaks, or after the heartbeat timeout. With one process it does nothing.

    Args:
      remedy: The last line on stderr of a process that ended without success.
    """
    count = jax.process_count()
    if count == 1:
        yield
        return
    words = LastWords(
        f"error: process {jax.process_index()} of {count} failed, or lost another that "
        f"did: all end. {remedy}"
    )
    try:
        yield
    except BaseException:
        # Processes that still work will never join this one's shutdown. Ending takes
        # no Python, which may be waiting for a device by then.
        silent = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=silent)
        raise
    words.release()
