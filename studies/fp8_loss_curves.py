"""Loss curves of the bf16 and the fp8 recipe over one another: same weights, same data.

    python -m studies.fp8_loss_curves --steps=100

A model of Qwen3-8B's width with two layers learns sums written as text, from scratch,
by the learner's real update (masters and moments in float32, gradients accumulated over
two micro-batches). Prints both curves and how far they lie apart; ``--out`` keeps every
step as JSON lines.

Hardware: one H200; two minutes for 100 steps, compilation included. ``--width=256``
runs on a CPU.
"""

import json
import pathlib
import time

import jax
import numpy as np
from absl import app, flags

from fp8rl_jax.console import print_table
from fp8rl_jax.data.batching import micro_batches, token_rows
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.learner import (
    Learner,
    SupervisedInputs,
    negative_log_likelihood,
)
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig

_STEPS = flags.DEFINE_integer("steps", 100, "Optimiser steps.", lower_bound=10)
_WIDTH = flags.DEFINE_integer("width", 4096, "Hidden size; heads and F follow.")
_ROWS = flags.DEFINE_integer("rows", 16, "Rows a step, in two micro-batches.")
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens a row.", lower_bound=16)
_OUT = flags.DEFINE_string("out", None, "JSON lines of every step.")
_RECIPES = ("bf16", "fp8")
_VOCAB_SIZE = 128


def model(width: int) -> Qwen3Config:
    """Two layers in Qwen3-8B's proportions."""
    return Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=width,
        num_layers=2,
        num_heads=max(width // 128, 4),
        num_kv_heads=max(width // 512, 1),
        head_dim=128,
        intermediate_size=3 * width,
        tie_word_embeddings=False,
    )


def rows_of_sums(rng: np.random.Generator, rows: int, length: int) -> list[list[int]]:
    """Byte ids of texts such as ``12+7=19;4+81=85;``."""

    def text():
        a, b = rng.integers(100, size=(2, length))
        return "".join(f"{x}+{y}={x + y};" for x, y in zip(a, b, strict=True))

    return [list(text()[:length].encode()) for _ in range(rows)]


def losses(recipe: str) -> tuple[list[float], float]:
    """Loss of every step, and the median seconds of a step after the first two."""
    config = model(_WIDTH.value)
    learner = Learner(
        config,
        get_recipe(recipe),
        OptimizerConfig(learning_rate=2e-4, warmup_steps=10),
        negative_log_likelihood,
        vocab_size=_VOCAB_SIZE,
        remat="none",
    )
    state = learner.init(init_params(config, jax.random.key(0)))
    codes = learner.quantize(state.params)
    rng = np.random.default_rng(0)
    curve, seconds = [], []
    for _ in range(_STEPS.value):
        texts = rows_of_sums(rng, _ROWS.value, _LENGTH.value)
        tokens, mask = token_rows([t[:1] for t in texts], [t[1:] for t in texts])
        batch = micro_batches((tokens, SupervisedInputs(mask)), _ROWS.value // 2)
        start = time.perf_counter()
        state, codes, metrics, _ = learner.update(state, codes, *learner.put(batch))
        curve.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    return curve, float(np.median(seconds[2:]))


def main(argv: list[str]) -> None:
    """Trains with both recipes and prints the curves."""
    del argv
    curves, seconds = zip(*map(losses, _RECIPES), strict=True)
    curves = np.array(curves)
    if _OUT.value:
        lines = (
            json.dumps({"step": i, **dict(zip(_RECIPES, map(float, c), strict=True))})
            for i, c in enumerate(curves.T, 1)
        )
        pathlib.Path(_OUT.value).write_text("\n".join(lines) + "\n")
    tenth = _STEPS.value // 10
    rows = []
    for start in range(0, _STEPS.value, tenth):
        means = curves[:, start : start + tenth].mean(1)
        rows.append(
            {
                "steps": f"{start + 1}-{start + tenth}",
                **{r: f"{m:.4f}" for r, m in zip(_RECIPES, means, strict=True)},
                "fp8 / bf16": f"{means[1] / means[0]:.4f}",
            }
        )
    print_table(
        rows, f"Mean loss, width {_WIDTH.value}, {jax.devices()[0].device_kind}"
    )
    for recipe, s in zip(_RECIPES, seconds, strict=True):
        print(f"{recipe}: {1e3 * s:.1f} ms a step (median)")


if __name__ == "__main__":
    app.run(main)
