"""Token log-probabilities against numpy float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from head_cases import LARGE, SMALL, f64, make, reference_log_softmax
from jax.sharding import PartitionSpec as P

from fp8rl_jax.logprobs import VOCAB_CHUNK, _reciprocal, token_log_probs

STATIC = ("temperature", "vocab_size")

log_probs = jax.jit(token_log_probs, static_argnames=STATIC)


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


def test_reciprocals_are_correctly_rounded():
    rng = np.random.default_rng(3)
    x = np.exp(rng.uniform(-80, 80, 100_000)).astype(np.float32)
    edges = [1.0, 0.5, 2.0, 1 - 2.0**-24, 1 + 2.0**-23, 2.0**-126, 2.0**125]
    x = np.append(x, np.float32(edges))
    actual = jax.jit(functools.partial(_reciprocal, jnp.dtype("float32")))(x)
    np.testing.assert_array_equal(actual, np.float32(1) / x)


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
