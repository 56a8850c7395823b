"""Trains a policy: ``python -m fp8rl_jax.train --config=configs/NAME.py``.

Any option can be changed, ``--config.grpo.num_steps=10``; configs/ has them all. A run
found in ``run_dir`` is resumed.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a configuration file.", lock_config=True
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Runs the experiment; errors of the user's making are one line."""
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    from fp8rl_jax.loop import train  # Imports JAX: not before the flags are right.
    from fp8rl_jax.parallel.start import initialize_distributed

    initialize_distributed()
    try:
        train(_CONFIG.value)
    except (ValueError, FloatingPointError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line; what is wrong with it becomes one line.

    An unknown option ends with the nearest name.
    """
    try:
        arguments = app.parse_flags_with_usage(argv)
        _CONFIG.value.lock()  # Only now does a file that is not there raise.
    except OSError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except (AttributeError, KeyError) as error:
        cause = error.args[0]
        if isinstance(cause, KeyError):
            cause = cause.args[0]
        sys.exit(f"error: unknown option {'. '.join(str(cause).splitlines())}")
    return arguments


def run() -> None:
    """The console entry point."""
    app.run(main, flags_parser=parse_flags)


if __name__ == "__main__":
    run()
