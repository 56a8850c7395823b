r"""Sizes a run: ``python -m fp8rl_jax.plan --config=configs/NAME.py --devices=N``.

    python -m fp8rl_jax.plan --config=configs/qwen3_8b.py --devices=8
    python -m fp8rl_jax.plan --config=configs/qwen3_8b.py --devices=16 --device=h100 \
        --config.model.size=14b

Prints what each part takes of a device in every phase, and how many tokens and
sequences the sampler holds. Needs neither devices, nor weights, nor data: the model is
that of ``model.path`` or ``model.size``. Ends with an error where the run would.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from fp8rl_jax.command_line import flags_parser

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a configuration file.", lock_config=True
)
_DEVICES = flags.DEFINE_integer("devices", None, "How many there are.", lower_bound=1)
_DEVICE = flags.DEFINE_string("device", "h200", "Kind of device: h200 or h100 (80 GB).")
_DEVICE_MEMORY_GB = flags.DEFINE_float(
    "device_memory_gb", None, "What JAX may use of one, 10^9 bytes; overrides --device."
)
flags.mark_flags_as_required(["config", "devices"])


def main(argv: list[str]) -> None:
    """Prints the plan; errors of the user's making are one line."""
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    # Imports JAX: not before the flags are right.
    from fp8rl_jax.sizing import device_memory_gb, print_plan

    try:
        memory = _DEVICE_MEMORY_GB.value
        if memory is None:
            memory = device_memory_gb(_DEVICE.value)
        print_plan(_CONFIG.value, _DEVICES.value, memory)
    except ValueError as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


def run() -> None:
    """The console entry point."""
    app.run(main, flags_parser=flags_parser(_CONFIG))


if __name__ == "__main__":
    run()
