"""Token log-probabilities and sampling against numpy float64."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8rl_jax.logprobs import VOCAB_CHUNK, _gumbel, sample_tokens, token_log_probs

# Rows of the head: one chunk; several, the last of them ragged and part padding.
SMALL = (40, 37)
LARGE = (2 * VOCAB_CHUNK + 130, 2 * VOCAB_CHUNK + 61)
STATIC = ("temperature", "vocab_size")

log_probs = jax.jit(token_log_probs, static_argnames=STATIC)
sample = jax.jit(sample_tokens, static_argnames=STATIC)


def f64(x):
    return np.asarray(x, np.float64)


def make(num_rows, batch, width=64, dtype=jnp.bfloat16, spread=3.0):
    """Hidden states, a float32 head, and targets that hit every chunk and edge."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((batch, width)), dtype)
    head = rng.standard_normal((num_rows, width)) * spread / math.sqrt(width)
    return hidden, jnp.asarray(head, jnp.float32)


def reference_log_softmax(hidden, head, temperature, vocab_size):
    """log softmax over the ids that count, [B, vocab_size], float64."""
    head = f64(head.astype(hidden.dtype))[:vocab_size]
    logits = f64(hidden) @ head.T / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_values_are_those_of_log_softmax(num_rows, vocab_size, temperature):
    edges = [0, 1, vocab_size - 1, min(VOCAB_CHUNK, vocab_size) - 1]
    targets = [*edges, *(VOCAB_CHUNK * i % vocab_size for i in (1, 2))]
    hidden, head = make(num_rows, len(targets))
    expected = reference_log_softmax(hidden, head, temperature, vocab_size)
    expected = expected[np.arange(len(targets)), targets]
    actual = log_probs(
        hidden,
        head,
        jnp.array(targets, jnp.int32),
        temperature=temperature,
        vocab_size=vocab_size,
    )
    assert actual.dtype == jnp.float32
    # Logits (below 32) and log-sum-exp are rounded to float32, then subtracted.
    np.testing.assert_allclose(actual, expected, atol=32 * 2.0**-23, rtol=0)


def test_padding_rows_of_the_head_do_not_count():
    hidden, head = make(*SMALL[:1], 4)
    targets = jnp.array([0, 5, 30, 36], jnp.int32)
    run = functools.partial(log_probs, temperature=1.0, vocab_size=SMALL[1])
    expected = run(hidden, head, targets)
    np.testing.assert_array_equal(
        run(hidden, head.at[SMALL[1] :].set(50.0), targets), expected
    )
    gradient = jax.grad(lambda head: run(hidden, head, targets).sum())(head)
    assert not np.any(gradient[SMALL[1] :]) and np.any(gradient[: SMALL[1]])


def test_shapes_and_batch_do_not_change_the_bits():
    hidden, head = make(LARGE[0], 12)
    targets = jnp.arange(12, dtype=jnp.int32) * 700
    run = functools.partial(log_probs, temperature=0.7, vocab_size=LARGE[1])
    expected = np.asarray(run(hidden, head, targets))
    cube = run(hidden.reshape(2, 3, 2, -1), head, targets.reshape(2, 3, 2))
    np.testing.assert_array_equal(np.ravel(cube), expected)
    for i in (0, 11):
        alone = run(hidden[i : i + 1], head, targets[i : i + 1])
        np.testing.assert_array_equal(alone, expected[i : i + 1])


@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_gradients_against_f64(num_rows, vocab_size):
    # d logits = weight (onehot - p) / temperature, rounded to bfloat16 (2^-8 relative);
    # d hidden and d head are products of it. d hidden is rounded once more.
    temperature = 0.8
    hidden, head = make(num_rows, 6)
    targets = np.arange(6) * (vocab_size - 1) // 5
    weights = np.random.default_rng(1).standard_normal(6).astype(np.float32)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(hidden, head):
        values = token_log_probs(
            hidden,
            head,
            jnp.asarray(targets, jnp.int32),
            temperature=temperature,
            vocab_size=vocab_size,
        )
        return (values * weights).sum()

    d_hidden, d_head = gradients(hidden, head)
    assert (d_hidden.dtype, d_head.dtype) == ("bfloat16", "float32")
    probs = np.exp(reference_log_softmax(hidden, head, temperature, vocab_size))
    onehot = np.eye(vocab_size)[targets]
    d_logits = (onehot - probs) * weights[:, None] / temperature
    rows = f64(head.astype(jnp.bfloat16))[:vocab_size]
    # 1.01: the probabilities are off by a few 1e-6 before the rounding.
    size = 1.01 * 2.0**-8 * abs(d_logits)
    expected = d_logits @ rows
    bound = size @ abs(rows) + 2.0**-8 * abs(expected)
    assert (abs(f64(d_hidden) - expected) <= bound).all()
    expected, bound = d_logits.T @ f64(hidden), size.T @ abs(f64(hidden))
    assert (abs(f64(d_head)[:vocab_size] - expected) <= bound + 1e-12).all()
    assert not np.any(d_head[vocab_size:])


def test_the_reference_gradient_is_the_derivative():
    # The formula above, against autodiff of log_softmax in float64.
    hidden, head = make(*SMALL[:1], 3)
    targets = np.array([1, 7, 20])
    with jax.enable_x64(True):

        def total(logits):
            values = jax.nn.log_softmax(logits / 0.8, axis=-1)
            return values[np.arange(3), targets].sum()

        logits = jnp.asarray(f64(hidden) @ f64(head).T)
        gradient = np.asarray(jax.grad(total)(logits))
        probs = np.asarray(jax.nn.softmax(logits / 0.8, axis=-1))
    np.testing.assert_allclose(
        gradient, (np.eye(SMALL[0])[targets] - probs) / 0.8, atol=1e-14
    )


def test_gradient_of_a_replicated_head_under_shard_map():
    hidden, head = make(*SMALL[:1], 8)
    targets = jnp.arange(8, dtype=jnp.int32)

    def gradients(hidden, head, targets):
        def total(hidden, head):
            return token_log_probs(
                hidden, head, targets, temperature=1.0, vocab_size=SMALL[1]
            ).sum()

        return jax.grad(total, argnums=(0, 1))(hidden, head)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = P("data")
    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(rows, P(), rows), out_specs=(rows, P())
    )
    d_hidden, d_head = jax.jit(sharded)(hidden, head, targets)
    expected = jax.jit(gradients)(hidden, head, targets)
    np.testing.assert_array_equal(f64(d_hidden), f64(expected[0]))
    np.testing.assert_allclose(d_head, expected[1], atol=1e-6)


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_sampled_log_probs_are_bitwise_those_of_the_trainer(
    num_rows, vocab_size, temperature
):
    hidden, head = make(num_rows, 16)
    tokens, sampled = sample(
        hidden, head, keys(16), temperature=temperature, vocab_size=vocab_size
    )
    assert tokens.dtype == jnp.int32
    trained = log_probs(
        hidden, head, tokens, temperature=temperature or 1.0, vocab_size=vocab_size
    )
    np.testing.assert_array_equal(
        np.asarray(sampled).view(np.uint32), np.asarray(trained).view(np.uint32)
    )
    if temperature == 0:
        expected = reference_log_softmax(hidden, head, 1.0, vocab_size).argmax(-1)
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "tied"),
    [
        (*SMALL, [7, 30]),
        (*LARGE, [VOCAB_CHUNK + 9, VOCAB_CHUNK + 70]),
        (*LARGE, [100, VOCAB_CHUNK + 3]),
        # Both in the last chunk, which overlaps the one before it.
        (*LARGE, [2 * VOCAB_CHUNK - 5, 2 * VOCAB_CHUNK + 2]),
    ],
)
def test_greedy_ties_go_to_the_lowest_id(num_rows, vocab_size, tied):
    hidden, head = make(num_rows, 2)
    best = 4 * jnp.sign(hidden[:1]).astype(jnp.float32)
    head = head.at[jnp.array(tied)].set(jnp.broadcast_to(best, (2, best.shape[1])))
    tokens, _ = sample(hidden, head, keys(2), temperature=0.0, vocab_size=vocab_size)
    assert tokens[0] == tied[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_padded_ids_are_never_drawn(num_rows, vocab_size, temperature):
    hidden, head = make(num_rows, 16)
    padding = 10 * jnp.sign(hidden[0]).astype(jnp.float32)
    head = head.at[vocab_size:].set(padding[None])
    hidden = jnp.broadcast_to(hidden[:1], hidden.shape)
    tokens, _ = sample(
        hidden, head, keys(16), temperature=temperature, vocab_size=vocab_size
    )
    assert (tokens < vocab_size).all()


def chi_square(counts, probs):
    """Pearson's statistic, bins of expectation below 5 pooled, and its bound.

    The bound is five standard deviations above the mean of the chi-square law.
    """
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    return statistic, freedom + 5 * math.sqrt(2 * freedom)


def test_frequencies_follow_the_softmax():
    hidden, head = make(*SMALL[:1], 1, spread=2.0)
    many = jnp.broadcast_to(hidden, (20000, hidden.shape[1]))
    tokens, _ = sample(many, head, keys(20000), temperature=0.7, vocab_size=SMALL[1])
    counts = np.bincount(tokens, minlength=SMALL[1])
    probs = np.exp(reference_log_softmax(hidden, head, 0.7, SMALL[1]))[0]
    statistic, bound = chi_square(counts, probs)
    assert statistic < bound
    wrong = np.exp(reference_log_softmax(hidden, head, 0.8, SMALL[1]))[0]
    statistic, bound = chi_square(counts, wrong)
    assert statistic > bound


def test_every_chunk_is_drawn_in_proportion():
    # A flat distribution over three chunks, the last of which overlaps the second.
    num_rows, vocab_size = LARGE
    hidden = jnp.zeros((2000, 8), jnp.bfloat16)
    tokens, logp = sample(
        hidden,
        jnp.zeros((num_rows, 8), jnp.float32),
        keys(2000),
        temperature=1.0,
        vocab_size=vocab_size,
    )
    np.testing.assert_allclose(logp, -math.log(vocab_size), rtol=1e-6)
    edges = [0, 2048, 4096, 6144, 8064, 8192, vocab_size]
    counts, _ = np.histogram(tokens, edges)
    statistic, bound = chi_square(counts, np.diff(edges) / vocab_size)
    assert statistic < bound
    assert len(np.unique(tokens)) > 1700


def test_a_row_depends_on_its_key_and_hidden_state_alone():
    hidden, head = make(LARGE[0], 24, spread=1.0)
    row_keys = keys(24)
    run = functools.partial(sample, temperature=1.0, vocab_size=LARGE[1])
    tokens, logp = run(hidden, head, row_keys)
    order = np.random.default_rng(2).permutation(24)
    permuted, permuted_logp = run(hidden[order], head, row_keys[order])
    np.testing.assert_array_equal(permuted, tokens[order])
    np.testing.assert_array_equal(permuted_logp, logp[order])
    for i in (0, 23):
        alone, _ = run(hidden[i : i + 1], head, row_keys[i : i + 1])
        assert alone[0] == tokens[i]
    other, _ = run(hidden, head, keys(24, seed=1))
    assert (other != tokens).mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gumbel_noise_is_finite_at_both_ends(dtype):
    bits = jnp.array([0, 2**31, 2**32 - 1], jnp.uint32)
    with jax.enable_x64(dtype == "float64"):
        noise = f64(_gumbel(bits, jnp.dtype(dtype)))
    uniform = (np.array([0, 2**22, 2**23 - 1]) + 0.5) / 2**23
    # log u of the last cell, 2^-24 below 1, is exact to 2^-24 of its size.
    np.testing.assert_allclose(noise, -np.log(-np.log(uniform)), rtol=1e-6)


def test_sampling_lowers_without_float64_elsewhere():
    hidden, head = make(*SMALL[:1], 2)
    run = functools.partial(sample_tokens, temperature=1.0, vocab_size=SMALL[1])
    traced = jax.jit(run).trace(hidden, head, keys(2))
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "f64" not in text


def test_bfloat16_logits_would_fail_the_bound():
    # Negative control of the first test: rounding logits to bfloat16 shows.
    hidden, head = make(*SMALL[:1], 6)
    head16 = f64(head.astype(jnp.bfloat16))[: SMALL[1]]
    logits = f64((f64(hidden) @ head16.T).astype(ml_dtypes.bfloat16))
    wrong = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = reference_log_softmax(hidden, head, 1.0, SMALL[1])
    assert abs(wrong - expected).max() > 100 * 32 * 2.0**-23


def test_gradients_under_vmap():
    hidden = jnp.asarray(
        np.random.default_rng(0).normal(size=(3, 5, 128)), jnp.bfloat16
    )
    head = jnp.asarray(np.random.default_rng(1).normal(size=(256, 128)), jnp.float32)
    targets = jnp.arange(15, dtype=jnp.int32).reshape(3, 5)

    def loss(hidden, head, targets):
        return token_log_probs(
            hidden, head, targets, temperature=1.0, vocab_size=250
        ).sum()

    grad = jax.grad(loss, (0, 1))
    mapped = jax.jit(jax.vmap(grad, (0, None, 0)))(hidden, head, targets)
    for i in range(3):
        alone = jax.jit(grad)(hidden[i], head, targets[i])
        for a, b in zip(mapped, alone, strict=True):
            np.testing.assert_allclose(
                np.asarray(a[i], np.float32), np.asarray(b, np.float32), rtol=1e-5
            )
