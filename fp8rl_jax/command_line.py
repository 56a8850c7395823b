"""Command lines: the flags they share; what is wrong with one becomes one line."""

import sys
from collections.abc import Callable

from absl import app, flags

_PROCESSES = (
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0, where nothing detects it."
    ),
    flags.DEFINE_integer("num_processes", None, "Processes of the run, likewise."),
    flags.DEFINE_integer("process_id", None, "Index of this process, likewise."),
)
_DETECT = flags.DEFINE_bool(
    "detect_cluster",
    None,
    "Whether jax.distributed detects the processes; by default where the environment "
    "tells how many there are.",
)
_TIMEOUT = flags.DEFINE_integer(
    "initialization_timeout", 300, "Seconds to wait for the other processes."
)


def join_processes() -> None:
    """Joins the processes of the run, as the flags or the environment say.

    Raises:
      ValueError: as of `initialize_distributed`.
    """
    # Imports JAX: not before the flags are right.
    from fp8rl_jax.parallel.start import initialize_distributed

    initialize_distributed(
        **{flag.name: flag.value for flag in _PROCESSES},
        detect=_DETECT.value,
        initialization_timeout=_TIMEOUT.value,
    )


def flags_parser(config: flags.FlagHolder) -> Callable[[list[str]], list[str]]:
    """Returns a ``flags_parser`` for `absl.app.run`.

    An unknown option ends with the nearest name.

    Args:
      config: the flag of the configuration file.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            arguments = app.parse_flags_with_usage(argv)
            config.value.lock()  # Only now does a file that is not there raise.
        except OSError as error:
            sys.exit(f"error: {' '.join(str(error).split())}")
        except (AttributeError, KeyError) as error:
            cause = error.args[0]
            if isinstance(cause, KeyError):
                cause = cause.args[0]
            sys.exit(f"error: unknown option {'. '.join(str(cause).splitlines())}")
        return arguments

    return parse
