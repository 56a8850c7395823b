"""Makes a Hugging Face checkpoint of a Qwen3 model with random weights.

For trying out the loader, the configs and the memory plan without real weights. A small
model with the real vocabulary and tokenizer:

    python -m fp8rl_jax.models.qwen3.make_checkpoint --out=runs/random-qwen3 \
        --tokenizer=path/to/qwen3_tokenizer

A published size, with as many layers as you like:

    python -m fp8rl_jax.models.qwen3.make_checkpoint --out=runs/random-0p6b --size=0.6b
"""

import dataclasses
import sys

import jax
from absl import app, flags

from fp8rl_jax.models.qwen3.checkpoint import export_hf
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params

# 20M parameters, nearly all in the embedding; every dimension a multiple of 128.
_SMALL = Qwen3Config(
    vocab_size=151936,
    hidden_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    intermediate_size=384,
    tie_word_embeddings=True,
    eos_token_ids=(151645, 151643),  # <|im_end|>, <|endoftext|>
)
_DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
)

_OUT = flags.DEFINE_string("out", None, "Folder to create.", required=True)
_SIZE = flags.DEFINE_enum(
    "size", None, [*QWEN3_SIZES], "Published size; left out, a small model."
)
_OVERRIDES = {
    name: flags.DEFINE_integer(name, None, f"Overrides {name} of the size.")
    for name in _DIMENSIONS
}
_TIED = flags.DEFINE_bool(
    "tie_word_embeddings", None, "Overrides tie_word_embeddings of the size."
)
_EOS = flags.DEFINE_list(
    "eos_token_ids", None, "Overrides the Qwen3 tokenizer's ids; empty for none."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Tokenizer folder to copy in.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Dtype of the weights."
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an existing model.")


def main(argv):
    """Draws the weights and writes the folder."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    changes = {name: flag.value for name, flag in _OVERRIDES.items()}
    changes["tie_word_embeddings"] = _TIED.value
    if _EOS.value is not None:
        changes["eos_token_ids"] = tuple(int(token) for token in _EOS.value)
    try:
        config = dataclasses.replace(
            QWEN3_SIZES[_SIZE.value] if _SIZE.value else _SMALL,
            **{name: value for name, value in changes.items() if value is not None},
        )
        export_hf(
            init_params(config, jax.random.key(_SEED.value), dtype=_DTYPE.value),
            config,
            _OUT.value,
            dtype=_DTYPE.value,
            tokenizer_folder=_TOKENIZER.value,
            overwrite=_OVERWRITE.value,
        )
    except ValueError as error:
        sys.exit(f"make_checkpoint: {error}")
    print(f"{_OUT.value}: {config.num_parameters:,} parameters")


if __name__ == "__main__":
    app.run(main)
