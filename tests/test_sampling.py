"""Drawing tokens, whole and truncated, against numpy float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import LARGE, SMALL, f64, make, reference_log_softmax

from fp8rl_jax.logprobs import VOCAB_CHUNK, token_log_probs
from fp8rl_jax.sampling import _gumbel, _random_bits, _thresholds, sample_tokens

log_probs = jax.jit(token_log_probs, static_argnames=("temperature", "vocab_size"))
jitted = jax.jit(sample_tokens, static_argnames=("vocab_size", "truncated"))

# Limits that limit nothing.
NONE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample(hidden, head, keys, *, temperature, vocab_size, **limits):
    """Draws with parameters that are one for all rows or one for each."""
    truncated = bool(limits)
    limits = {"temperature": temperature, **NONE, **limits}
    arrays = {
        name: jnp.broadcast_to(
            jnp.asarray(x, jnp.int32 if name == "top_k" else jnp.float32),
            hidden.shape[:1],
        )
        for name, x in limits.items()
    }
    return jitted(
        hidden, head, keys, vocab_size=vocab_size, truncated=truncated, **arrays
    )


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


@pytest.mark.parametrize("limits", [{}, {"top_k": 4, "top_p": 0.9, "min_p": 0.01}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_padded_ids_are_never_drawn(num_rows, vocab_size, temperature, limits):
    hidden, head = make(num_rows, 16)
    padding = 10 * jnp.sign(hidden[0]).astype(jnp.float32)
    head = head.at[vocab_size:].set(padding[None])
    hidden = jnp.broadcast_to(hidden[:1], hidden.shape)
    tokens, _ = sample(
        hidden, head, keys(16), temperature=temperature, vocab_size=vocab_size, **limits
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


@pytest.mark.parametrize("limits", [{}, NONE])
def test_sampling_lowers_without_float64_elsewhere(limits):
    hidden, head = make(*SMALL[:1], 2)
    run = functools.partial(sample, temperature=1.0, vocab_size=SMALL[1], **limits)
    traced = jax.jit(run).trace(hidden, head, keys(2))
    assert "f64" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # On Hopper only statistics of tiles, here of one, are merged in it.
    assert set(re.findall(r"<[\dx]*xf64>", text)) <= {
        f"<{shape}xf64>" for shape in ("2", "1x1x2", "1x1x1x2", "1x2x1x2")
    }


def test_noise_is_that_of_jax():
    row_keys, counts = keys(3), np.arange(700, dtype=np.uint32)[::-1]
    bits = _random_bits(jax.random.key_data(row_keys), counts)
    expected = jax.vmap(lambda key: jax.random.bits(key, (700,)))(row_keys)
    np.testing.assert_array_equal(bits, expected[:, ::-1])


def test_rows_have_their_own_temperatures():
    num_rows, vocab_size = LARGE
    hidden, head = make(num_rows, 6)
    run = functools.partial(sample, head=head, vocab_size=vocab_size)
    temperatures = np.array([0.0, 0.3, 0.7, 1.0, 1.7, 0.0], np.float32)
    tokens, logp = run(hidden, keys=keys(6), temperature=temperatures)
    for temperature in np.unique(temperatures):
        rows = temperatures == temperature
        alone, alone_logp = run(
            hidden[rows], keys=keys(6)[rows], temperature=temperature
        )
        np.testing.assert_array_equal(alone, tokens[rows])
        np.testing.assert_array_equal(alone_logp, logp[rows])
        trained = log_probs(
            hidden[rows],
            head,
            alone,
            temperature=float(temperature) or 1.0,
            vocab_size=vocab_size,
        )
        np.testing.assert_array_equal(trained, alone_logp)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, LARGE])
def test_a_row_without_limits_draws_the_same_on_both_paths(num_rows, vocab_size):
    hidden, head = make(num_rows, 24, spread=1.0)
    temperature = np.resize(np.float32([1.0, 0.6, 0.0]), 24)
    run = functools.partial(
        sample, hidden, head, keys(24), temperature=temperature, vocab_size=vocab_size
    )
    tokens, logp = run()
    limited = np.arange(24) % 2 == 0
    mixed, mixed_logp = run(top_k=np.where(limited, 2, 0))
    np.testing.assert_array_equal(mixed[~limited], tokens[~limited])
    np.testing.assert_array_equal(mixed_logp[~limited], logp[~limited])
    assert np.any(mixed[limited] != tokens[limited])
    trained = [
        log_probs(
            hidden, head, mixed, temperature=float(t) or 1.0, vocab_size=vocab_size
        )
        for t in temperature[:3]
    ]
    trained = np.resize(np.stack(trained), (3, 24))[np.arange(24) % 3, np.arange(24)]
    np.testing.assert_array_equal(mixed_logp, trained)


def kept_ids(logp, top_k=0, top_p=1.0, min_p=0.0):
    """Which of a row's ids may be drawn, by sorting; float64."""
    order = np.argsort(-logp, kind="stable")
    probs = np.exp(logp[order] - logp[order[0]])
    count = min(top_k, len(probs)) if top_k else len(probs)
    if top_p < 1:
        mass = np.cumsum(probs[:count])
        count = 1 + int(np.argmax(mass >= np.float32(top_p) * mass[-1]))
    count = min(count, int(np.sum(probs >= min_p)))
    return logp >= logp[order[count - 1]]


def thresholded(logits, vocab_size, **limits):
    """Which of [B, V] logits :func:`_thresholds` keeps."""
    limits = NONE | limits
    batch = logits.shape[0]
    arrays = (
        jnp.full(batch, limits["top_k"], jnp.int32),
        jnp.full(batch, limits["top_p"], jnp.float32),
        jnp.full(batch, limits["min_p"], jnp.float32),
    )
    logits = jnp.asarray(logits, jnp.float32)
    counts = jnp.arange(logits.shape[1]) < vocab_size
    chunks = jnp.where(counts[None], logits, -jnp.inf)[None]
    fn = jax.jit(_thresholds, static_argnums=(0, 5))
    with jax.enable_x64(True):
        threshold = fn(jnp.dtype("float64"), chunks, *arrays, vocab_size)
    return np.asarray(counts[None] & (chunks[0] >= threshold[:, None]))


LIMITS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 3, "top_p": 0.99, "min_p": 1e-6},
    NONE,
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [SMALL, (3000, 2900)])
def test_thresholds_keep_what_a_sort_keeps(num_rows, vocab_size, limits):
    rng = np.random.default_rng(5)
    logits = 3 * rng.standard_normal((12, num_rows)).astype(np.float32)
    logits[:, vocab_size:] = 50.0  # padding
    logits[6:] -= 40.0  # all negative
    kept = thresholded(logits, vocab_size, **limits)
    assert not kept[:, vocab_size:].any()
    for row in range(12):
        expected = kept_ids(f64(logits[row, :vocab_size]), **limits)
        np.testing.assert_array_equal(kept[row, :vocab_size], expected)


def test_ties_at_the_threshold_are_all_kept():
    # Probabilities 4, 2, 2, 2, 1, 1 of 12; the two zeros differ in their sign.
    logits = np.log(np.array([[2, 1, 4, 2, 1, 2]])) - math.log(2)
    logits[0, 0] = -0.0
    ids = functools.partial(thresholded, logits, 6)
    for limits, expected in (
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {0, 2, 3, 5}),
        ({"top_k": 5}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.3}, {2}),
        ({"top_p": 0.4}, {0, 2, 3, 5}),
        # Of the ten in the first four ids: after the ties of top_k.
        ({"top_k": 2, "top_p": 0.39}, {2}),
        ({"top_k": 2, "top_p": 0.41}, {0, 2, 3, 5}),
        ({"min_p": 0.499}, {0, 2, 3, 5}),
        ({"min_p": 0.501}, {2}),
    ):
        assert set(np.flatnonzero(ids(**limits)[0])) == expected, limits


def test_the_mass_is_compared_exactly():
    # Three of four parts are in the first three ids.
    ids = functools.partial(thresholded, np.log([[1, 1, 1, 0.5, 0.5]]), 5)
    share = np.float32(0.75)
    assert ids(top_p=share).sum() == 3
    assert ids(top_p=np.nextafter(share, np.float32(1))).sum() == 5


def test_thresholds_depend_on_no_batch_and_no_padding():
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((9, 1000)).astype(np.float32)
    limits = {"top_k": 700, "top_p": 0.9, "min_p": 1e-3}
    kept = thresholded(logits, 1000, **limits)
    for row in range(9):
        padded = np.pad(logits[row : row + 1], ((0, 0), (0, row * 37)))
        alone = thresholded(padded, 1000, **limits)
        np.testing.assert_array_equal(alone[0, :1000], kept[row])


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_truncated_frequencies_follow_the_renormalised_softmax(limits):
    hidden, head = make(*SMALL[:1], 1, spread=2.0)
    many = jnp.broadcast_to(hidden, (20000, hidden.shape[1]))
    tokens, logp = sample(
        many, head, keys(20000), temperature=0.7, vocab_size=SMALL[1], **limits
    )
    full = reference_log_softmax(hidden, head, 0.7, SMALL[1])[0]
    kept = kept_ids(full, **limits)
    assert 2 <= kept.sum() < SMALL[1]
    counts = np.bincount(tokens, minlength=SMALL[1])
    assert not counts[~kept].any() and counts[kept].all()
    probs = np.where(kept, np.exp(full), 0.0)
    statistic, bound = chi_square(counts, probs / probs.sum())
    assert statistic < bound
    # What is recorded is the log-probability in the full distribution.
    np.testing.assert_allclose(logp, full[tokens], atol=1e-5)


def test_limits_apply_across_chunks():
    num_rows, vocab_size = LARGE
    hidden, head = make(num_rows, 200, spread=1.0)
    hidden = jnp.broadcast_to(hidden[:1], hidden.shape)
    full = reference_log_softmax(hidden[:1], head, 1.5, vocab_size)[0]
    for limits in ({"top_k": 6}, {"top_p": 0.01}, {"min_p": 0.3}):
        tokens, _ = sample(
            hidden, head, keys(200), temperature=1.5, vocab_size=vocab_size, **limits
        )
        kept = np.flatnonzero(kept_ids(full, **limits))
        assert len(np.unique(kept // VOCAB_CHUNK)) > 1
        assert len(kept) < 500 and np.isin(tokens, kept).all()
        assert len(np.unique(np.asarray(tokens) // VOCAB_CHUNK)) > 1
