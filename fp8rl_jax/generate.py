r"""Completes prompts: ``python -m fp8rl_jax.generate --config=configs/NAME.py``.

    python -m fp8rl_jax.generate --config=configs/qwen3_8b.py \
        --config.model.path=MODEL_FOLDER --prompt="What is 2 + 2?" --stream
    python -m fp8rl_jax.generate --config=configs/qwen3_8b.py \
        --config.tokenizer.path=TOKENIZER_FOLDER --checkpoint=runs/qwen3_8b \
        --input=prompts.jsonl --output=completions.jsonl --num_samples=4

The weights are those of ``model.path``, of ``--checkpoint``, or random. docs/rollout.md
has the formats.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from fp8rl_jax.command_line import flags_parser, join_processes

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a configuration file.", lock_config=True
)
flags.mark_flag_as_required("config")
_OPTIONS = (
    flags.DEFINE_string("prompt", None, "A text to complete."),
    flags.DEFINE_string("input", None, "Prompts, a JSON object a line."),
    flags.DEFINE_string("output", None, "Completions, a JSON object a line."),
    flags.DEFINE_string("checkpoint", None, "Run directory to take weights from."),
    flags.DEFINE_integer("step", None, "Of the checkpoint; the latest if left out."),
    flags.DEFINE_integer("num_samples", 1, "Completions per prompt."),
    flags.DEFINE_float("temperature", None, "0: the most likely token."),
    flags.DEFINE_integer("top_k", None, "Draw from so many tokens; 0: all."),
    flags.DEFINE_float("top_p", None, "Draw from tokens of this probability."),
    flags.DEFINE_float("min_p", None, "Least share of the highest probability."),
    flags.DEFINE_integer("max_new_tokens", None, "Longest completion."),
    flags.DEFINE_multi_string("stop", [], "Text that ends a completion; repeatable."),
    flags.DEFINE_integer("seed", None, "Of the sampling noise; config.seed if none."),
    flags.DEFINE_bool("raw", False, "Take prompts as they are: no chat template."),
    flags.DEFINE_bool("stream", False, "Print the text as it is drawn."),
)


def main(argv: list[str]) -> None:
    """Completes; errors of the user's making are one line."""
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.ERROR)  # Orbax warns that a run is read only.
    # Imports JAX: not before the flags are right.
    from fp8rl_jax.compilation_cache import use_compilation_cache
    from fp8rl_jax.generation import Options, generate
    from fp8rl_jax.parallel.failure import ending_together

    try:
        options = Options(**{flag.name: flag.value for flag in _OPTIONS})
        join_processes()
        use_compilation_cache(_CONFIG.value.compilation_cache)
        with ending_together("The same command begins anew."):
            finished = generate(_CONFIG.value, options)
    except (ValueError, OSError, FloatingPointError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if not finished:
        sys.exit(130)


def run() -> None:
    """The console entry point."""
    app.run(main, flags_parser=flags_parser(_CONFIG))


if __name__ == "__main__":
    run()
