"""The mismatch benchmark: its trace is the model, and it finds what differs."""

import functools
import importlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.learner import policy_log_probs
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    tie_word_embeddings=True,
)


@pytest.fixture
def layer_trace(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.layer_trace")


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_the_trace_is_the_model(name, layer_trace):
    precision = get_recipe(name).train
    params = init_params(CONFIG, jax.random.key(0))
    ids = np.random.default_rng(0).integers(120, size=(2, 17)).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], positions, np.ones_like(positions))
    expected = jax.jit(
        functools.partial(
            policy_log_probs, CONFIG, precision, vocab_size=120, temperature=1.0
        )
    )(params, batch)
    trace = jax.jit(
        functools.partial(layer_trace.trace, CONFIG, precision, vocab_size=120)
    )
    (layers, head), _ = trace(params, *batch[:3], None)
    np.testing.assert_array_equal(head["log_probs"], expected)

    # With recorded values, what one op reads changes that op's output alone.
    layers["gate"] = layers["gate"].at[1].add(jnp.bfloat16(1))
    (changed, _), _ = trace(params, *batch[:3], None, recorded=(layers, head))
    differ = {
        (op, layer)
        for op in layer_trace.LAYER_OPS
        for layer in range(CONFIG.num_layers)
        if not np.array_equal(changed[op][layer], layers[op][layer])
    }
    assert differ == {("gate", 1), ("silu_product", 1)}


def table_cells(*args: str) -> dict[str, list[str]]:
    """Runs the benchmark; the cells of its tables by row name."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mismatch", "--prompts=1", "--samples=2"]
        + ["--prompt_length=9", "--new_tokens=3", "--trace_steps=1", *args],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = (line.strip("│").split("│") for line in done.stdout.splitlines())
    return {row[0].strip(): [c.strip() for c in row[1:]] for row in rows if row[1:]}


@pytest.mark.slow
def test_one_policy_differs_nowhere(layer_trace):
    cells = table_cells("--recipe=fp8")
    assert cells.pop("update - sampler") == ["6", "100.0%", "0", "0", "0", "0"]
    ops = [row for row in cells.values() if len(row) == 4]
    num_ops = len(layer_trace.LAYER_OPS) + len(layer_trace.HEAD_OPS)
    assert len(ops) == num_ops and all(row == ["0"] * 4 for row in ops)


@pytest.mark.slow
def test_two_precisions_differ_in_linears_and_attention():
    cells = table_cells("--recipe=fp8_rollout")
    assert cells["update - sampler"][1] != "100.0%"
    own = {op: row[3] for op, row in cells.items() if len(row) == 4}
    linears = {"qkv", "o_proj", "gate", "up", "down_proj"}
    assert {op for op, cell in own.items() if cell != "0"} == linears | {"attention"}
