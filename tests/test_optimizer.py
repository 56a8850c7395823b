"""AdamW against optax's own, and moments that are stored in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8rl_jax.optimizer import OptimizerConfig, stochastic_round

ALL_NOISE = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("x", [1.0, 1.001, -3.14159, 2.0**-126 * 1.3, 0.0, 1e-30])
def test_stochastic_rounding_is_right_on_average(x):
    x = np.float32(x)
    rounded = stochastic_round(jnp.full(ALL_NOISE.shape, x), jnp.asarray(ALL_NOISE))
    values = np.asarray(rounded.astype(jnp.float32), np.float64)
    # Over all noise, the neighbours come up exactly as often as they should.
    assert values.mean() == x
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    assert set(values) <= {float(below), float(above)}


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(x):
    rounded = stochastic_round(jnp.full((2,), x), jnp.array([0, 2**16 - 1], jnp.uint16))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), np.float32([x, x]))


def params_and_gradients(steps, size=4000):
    rng = np.random.default_rng(0)
    params = {"layer": {"kernel": jnp.asarray(rng.normal(size=size), jnp.float32)}}
    params["layer"]["scale"] = jnp.ones((size,))
    grads = [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)
        for _ in range(steps)
    ]
    return params, grads


def run(tx, params, grads):
    @jax.jit
    def step(params, state, grads):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def test_in_float32_it_is_adamw():
    config = OptimizerConfig(1e-2, weight_decay=0.1, b2=0.95, max_grad_norm=1.0)
    expected = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            config.schedule(),
            b2=0.95,
            weight_decay=0.1,
            mask=lambda p: {"layer": {"kernel": True, "scale": False}},
        ),
    )
    params, grads = params_and_gradients(5)
    found = run(config.transform(), params, grads)[0]
    jax.tree.map(np.testing.assert_array_equal, found, run(expected, params, grads)[0])


def test_moments_have_the_dtypes_asked_for():
    config = OptimizerConfig(1e-2, mu_dtype="bfloat16")
    params, grads = params_and_gradients(2)
    _, state = run(config.transform(), params, grads)
    dtypes = {
        name: {x.dtype.name for x in jax.tree.leaves(optax.tree.get(state, name))}
        for name in ("mu", "nu")
    }
    assert dtypes == {"mu": {"bfloat16"}, "nu": {"float32"}}
    with pytest.raises(ValueError, match="nu_dtype='float16': choose one of float32"):
        OptimizerConfig(1e-2, nu_dtype="float16")


def test_a_second_moment_in_bfloat16_decays():
    """By 0.1 % a step, which rounding to nearest would undo."""
    wide, narrow = (
        OptimizerConfig(1e-3, nu_dtype=dtype).transform()
        for dtype in ("float32", "bfloat16")
    )
    params, grads = params_and_gradients(3)
    grads += [jax.tree.map(jnp.zeros_like, params)] * 300
    means = []
    for tx in (wide, narrow):
        _, state = run(tx, params, grads)
        nu = optax.tree.get(state, "nu")["layer"]["kernel"]
        means.append(float(jnp.mean(nu.astype(jnp.float32))))
    assert means[1] == pytest.approx(means[0], rel=0.01)
    start = jnp.bfloat16(1.0)
    assert (start.astype(jnp.float32) * 0.999).astype(jnp.bfloat16) == start


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_moments_in_bfloat16_learn_as_in_float32(b2):
    """Logistic regression on noisy batches: the same loss to 1 %."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=64)
    inputs = rng.normal(size=(400, 32, 64)).astype(np.float32)
    labels = (rng.random((400, 32)) < 1 / (1 + np.exp(-(inputs @ truth)))).astype(
        np.float32
    )

    def loss(params, x, y):
        logits = x @ params["layer"]["kernel"]
        return jnp.mean(jax.nn.softplus(logits) - y * logits)

    def final_loss(dtype):
        config = OptimizerConfig(
            3e-2, b2=b2, mu_dtype=dtype, nu_dtype=dtype, weight_decay=0.0
        )
        tx = config.transform()

        def step(carry, batch):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, *batch)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), value

        params = {"layer": {"kernel": jnp.zeros(64)}}
        with jax.numpy_dtype_promotion("standard"):
            carry = params, tx.init(params)
            _, values = jax.jit(lambda c: jax.lax.scan(step, c, (inputs, labels)))(
                carry
            )
        return float(values[0]), float(values[-100:].mean())

    (start, exact), (_, rounded) = final_loss("float32"), final_loss("bfloat16")
    assert exact < 0.5 * start
    assert rounded == pytest.approx(exact, rel=0.01)
