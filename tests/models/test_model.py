"""The Qwen3 forward pass against transformers, mlx-lm and itself."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.fp8.weights import quantize_weights, training_weights
from fp8rl_jax.learner import policy_log_probs
from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.checkpoint import export_hf, load_hf
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.models.qwen3.model import Qwen3, RMSNorm
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import shard_batch, tree_shardings

GOLDEN = Path(__file__).parent / "goldens" / "qwen3"
GOLDEN_PADDING = 5  # on the left of row 0
BF16 = get_recipe("bf16").train
FP8 = get_recipe("fp8").train

TINY = Qwen3Config(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    tie_word_embeddings=True,
    dtype="float32",
)
# Two blocks of 128 along every contraction.
BLOCKED = Qwen3Config(
    vocab_size=256,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    tie_word_embeddings=True,
)
RECIPES = pytest.mark.parametrize("precision", [BF16, FP8], ids=["bf16", "fp8"])


def random_params(config, seed=0, std=0.1):
    """Random parameters whose norm scales are not all 1."""
    params = init_params(config, jax.random.key(seed), std=std)
    keys = iter(jax.random.split(jax.random.key(seed + 1), 100))

    def draw(path, x):
        if path[-1].key != "scale":
            return x
        return x + 0.2 * jax.random.normal(next(keys), x.shape, x.dtype)

    return jax.tree.map_with_path(draw, params)


def random_tokens(config, shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(config.vocab_size, size=shape).astype(np.int32)


@jax.jit(static_argnames=("config", "precision"))
def _hidden(config, params, tokens, precision):
    codes = quantize_weights(params)
    model = Qwen3(config, training_weights(params, codes, precision.linear))
    positions = jnp.broadcast_to(
        jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
    )
    return model(tokens, positions, precision)[0], model.head


def logits_of(config, params, tokens, precision=BF16):
    """Logits [B, T, V] in float64, the head applied by numpy."""
    hidden, head = _hidden(config, params, tokens, precision)
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    return np.einsum("BTD,VD->BTV", hidden, head)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl_divergence(logits, other):
    """KL(softmax(logits) || softmax(other)) of every position."""
    log_p, log_q = log_softmax(logits), log_softmax(other)
    return np.sum(np.exp(log_p) * (log_p - log_q), -1)


@jax.jit(static_argnames=("config", "precision", "temperature", "vocab_size"))
def _log_probs(config, params, batch, precision, temperature, vocab_size):
    codes = quantize_weights(params)
    return policy_log_probs(
        config,
        precision,
        training_weights(params, codes, precision.linear),
        batch,
        vocab_size=vocab_size,
        temperature=temperature,
    )


def log_probs_of(
    config, params, rows, precision=BF16, temperature=1.0, left=0, right=0
):
    """Log-probs [B, T - 1] of every token but the first, of padded rows.

    Args:
      rows: token ids [B, T].
      left: padding tokens to the left of each row, in no segment.
      right: likewise, to the right.
    """
    rows = np.asarray(rows)

    def pad(x):
        return np.pad(x.astype(np.int32), ((0, 0), (left, right)))

    length = rows.shape[1] - 1
    batch = TokenBatch(
        tokens=pad(rows[:, :-1]),
        targets=pad(rows[:, 1:]),
        positions=pad(np.broadcast_to(np.arange(length), (len(rows), length))),
        segments=pad(np.ones((len(rows), length))),
    )
    out = _log_probs(config, params, batch, precision, temperature, config.vocab_size)
    return np.asarray(out)[:, left : left + length]


@pytest.fixture(scope="module")
def golden():
    """Logits of transformers 5 in float32, with the padding taken off."""
    data = np.load(GOLDEN / "golden.npz")
    rows = [
        (ids[mask == 1].astype(np.int32), logits[mask == 1])
        for ids, mask, logits in zip(
            data["ids"], data["mask"], data["logits"], strict=True
        )
    ]
    assert [len(ids) for ids, _ in rows] == [17 - GOLDEN_PADDING, 17]
    return rows


@pytest.mark.parametrize(
    ("dtype", "max_error", "max_kl"),
    [("float32", 5e-6, 1e-10), ("bfloat16", 2e-2, 5e-5)],
)
def test_logits_equal_those_of_transformers(golden, dtype, max_error, max_kl):
    config = Qwen3Config.from_hf_folder(GOLDEN, dtype=dtype)
    params = load_hf(GOLDEN, config)
    for ids, expected in golden:
        assert expected.std() > 0.1
        logits = logits_of(config, params, ids[None])[0]
        assert np.abs(logits - expected).max() < max_error
        assert kl_divergence(expected, logits).max() < max_kl


def test_log_probs_equal_those_of_transformers(golden):
    config = Qwen3Config.from_hf_folder(GOLDEN, dtype="float32")
    params = load_hf(GOLDEN, config)
    for ids, logits in golden:
        expected = log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
        found = log_probs_of(config, params, ids[None])[0]
        np.testing.assert_allclose(found, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_kv_heads": 1, "rope_theta": 1e4},
        {"num_kv_heads": 4, "head_dim": 16, "tie_word_embeddings": False},
        {"rms_norm_eps": 1e-2},
    ],
    ids=["tied", "untied", "one-kv-head", "no-groups", "eps"],
)
def test_logits_equal_those_of_mlx_lm(change, tmp_path):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed here")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed here")
    config = dataclasses.replace(TINY, **change)
    params = random_params(config, std=0.2)
    export_hf(params, config, tmp_path / "model", dtype=jnp.float32)
    tokens = random_tokens(config, (2, 40))
    with mx.stream(mx.cpu):
        model, _ = utils.load_model(tmp_path / "model")
        expected = np.array(model(mx.array(tokens)).astype(mx.float32))
    logits = logits_of(config, params, tokens)
    assert expected.std() > 1.0
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    assert kl_divergence(expected, logits).max() < 1e-7


@RECIPES
def test_padding_does_not_change_log_probs(precision):
    params = random_params(BLOCKED, std=0.05)
    rows = random_tokens(BLOCKED, (2, 31))
    expected = log_probs_of(BLOCKED, params, rows, precision)
    for count in (3, 17):
        for side in ("left", "right"):
            found = log_probs_of(BLOCKED, params, rows, precision, **{side: count})
            np.testing.assert_array_equal(found, expected)


@RECIPES
def test_later_tokens_do_not_change_earlier_log_probs(precision):
    params = random_params(BLOCKED, std=0.05)
    rows = random_tokens(BLOCKED, (1, 160))
    before = log_probs_of(BLOCKED, params, rows, precision)[0]
    for index in (5, 127, 128, 150):
        changed = rows.copy()
        changed[0, index] = (changed[0, index] + 1) % BLOCKED.vocab_size
        after = log_probs_of(BLOCKED, params, changed, precision)[0]
        # Entry t is the log-prob of token t + 1.
        np.testing.assert_array_equal(after[: index - 1], before[: index - 1])
        assert (after[index - 1 :] != before[index - 1 :]).all()


def test_segments_of_a_row_do_not_see_each_other():
    params = random_params(BLOCKED, std=0.05)
    first, second = random_tokens(BLOCKED, (2, 20))
    batch = TokenBatch(*(np.zeros((1, 160), np.int32) for _ in range(4)))
    for start, segment, row in ((0, 1, first), (128, 2, second)):
        here = slice(start, start + 19)
        batch.tokens[0, here], batch.targets[0, here] = row[:-1], row[1:]
        batch.positions[0, here], batch.segments[0, here] = np.arange(19), segment
    packed = np.asarray(_log_probs(BLOCKED, params, batch, FP8, 1.0, 256))[0]
    alone = log_probs_of(BLOCKED, params, [first, second], FP8)
    np.testing.assert_array_equal(packed[:19], alone[0])
    np.testing.assert_array_equal(packed[128 : 128 + 19], alone[1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_temperature_is_applied_once(temperature):
    params = random_params(TINY, std=0.2)
    rows = random_tokens(TINY, (2, 12))
    expected = log_softmax(logits_of(TINY, params, rows) / temperature)
    expected = np.take_along_axis(expected[:, :-1], rows[:, 1:, None], -1)[..., 0]
    found = log_probs_of(TINY, params, rows, temperature=temperature)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@jax.jit(static_argnames="config")
@functools.partial(jax.value_and_grad, argnums=1)
def _sum_of_log_probs(config, params, rows):
    length = rows.shape[1] - 1
    positions = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (len(rows), length)
    )
    batch = TokenBatch(rows[:, :-1], rows[:, 1:], positions, jnp.ones_like(positions))
    log_probs = policy_log_probs(
        config, BF16, params, batch, vocab_size=config.vocab_size, temperature=1.0
    )
    return jnp.sum(log_probs)


def test_a_tied_embedding_is_one_leaf_with_the_sum_of_both_gradients():
    untied = dataclasses.replace(TINY, tie_word_embeddings=False)
    params = random_params(TINY)
    assert "lm_head" not in params
    rows = random_tokens(TINY, (2, 12))
    _, tied = _sum_of_log_probs(TINY, params, rows)
    head = {"lm_head": {"kernel": params["embed"]["embedding"]}}
    _, grads = _sum_of_log_probs(untied, params | head, rows)
    of_input = np.asarray(grads["embed"]["embedding"], np.float64)
    of_head = np.asarray(grads["lm_head"]["kernel"], np.float64)
    assert min(np.linalg.norm(of_input), np.linalg.norm(of_head)) > 1.0
    np.testing.assert_allclose(
        tied["embed"]["embedding"], of_input + of_head, rtol=1e-5, atol=1e-5
    )


def test_the_gradient_is_the_slope_of_the_loss():
    """Along random directions of every leaf, against a central difference."""
    params = random_params(TINY)
    rows = random_tokens(TINY, (2, 12))
    _, grads = _sum_of_log_probs(TINY, params, rows)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), params
    )
    slope = sum(
        np.vdot(np.asarray(g, np.float64), d)
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    step = 2.0**-12

    def at(sign):
        moved = jax.tree.map(lambda x, d: x + sign * step * d, params, direction)
        return float(_sum_of_log_probs(TINY, moved, rows)[0])

    assert abs(slope) > 10.0
    np.testing.assert_allclose((at(1) - at(-1)) / (2 * step), slope, rtol=3e-3)


def test_every_norm_has_eps_1e_6():
    assert TINY.rms_norm_eps == 1e-6
    # Mean square 1e-6: half of what is under the root is eps.
    x = np.random.default_rng(0).normal(size=(1, 3, 64)) * 1e-3
    scale = np.random.default_rng(1).normal(size=64).astype(np.float32)
    norm = RMSNorm(jnp.asarray(scale), TINY.rms_norm_eps)
    zero = jnp.zeros(x.shape, jnp.float32)
    _, found = norm.add_and_norm(jnp.asarray(x, jnp.float32), zero)
    expected = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_fp8_stays_close_to_bf16():
    params = random_params(BLOCKED, std=0.05)
    tokens = random_tokens(BLOCKED, (2, 150))
    exact = logits_of(
        dataclasses.replace(BLOCKED, dtype="float32"), params, tokens, BF16
    )
    assert exact.std() > 0.5
    bf16 = kl_divergence(exact, logits_of(BLOCKED, params, tokens, BF16)).mean()
    fp8 = kl_divergence(exact, logits_of(BLOCKED, params, tokens, FP8)).mean()
    assert 0.0 < bf16 < 1e-4
    assert 1e-4 < fp8 < 1e-2


@RECIPES
def test_a_sharded_forward_equals_that_of_one_device(precision):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    params = random_params(BLOCKED, std=0.05)
    rows = random_tokens(BLOCKED, (4, 20))
    expected = log_probs_of(BLOCKED, params, rows, precision)
    shardings = tree_shardings(mesh, DEFAULT_RULES, param_axes(True), params)
    sharded = jax.device_put(params, shardings)
    batch = TokenBatch(
        rows[:, :-1],
        rows[:, 1:],
        np.tile(np.arange(19, dtype=np.int32), (4, 1)),
        np.ones((4, 19), np.int32),
    )
    batch = shard_batch(mesh, DEFAULT_RULES, batch)
    with jax.set_mesh(mesh):
        found = _log_probs(BLOCKED, sharded, batch, precision, 1.0, 256)
    assert len(found.sharding.device_set) == 8
    np.testing.assert_array_equal(np.asarray(found), expected)
