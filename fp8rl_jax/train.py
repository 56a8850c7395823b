"""Trains a policy: ``python -m fp8rl_jax.train --config=configs/NAME.py``.

Any option can be changed, ``--config.grpo.num_steps=10``; configs/ has them all. A run
found in ``run_dir`` is resumed.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from fp8rl_jax.command_line import flags_parser, join_processes

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a configuration file.", lock_config=True
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Runs the experiment; errors of the user's making are one line."""
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    # Imports JAX: not before the flags are right.
    from fp8rl_jax.compilation_cache import use_compilation_cache
    from fp8rl_jax.loop import train
    from fp8rl_jax.parallel.failure import ending_together
    from fp8rl_jax.parallel.start import is_primary

    try:
        join_processes()
        use_compilation_cache(_CONFIG.value.compilation_cache)
        if not is_primary():
            logging.set_verbosity(logging.ERROR)
        with ending_together(
            "Restart: the run resumes from the last checkpoint in "
            f"{_CONFIG.value.run_dir}/checkpoints."
        ):
            train(_CONFIG.value)
    except (ValueError, FloatingPointError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


def run() -> None:
    """The console entry point."""
    app.run(main, flags_parser=flags_parser(_CONFIG))


if __name__ == "__main__":
    run()
