"""The optimiser step: invariances, masters, codes, schedule, and what it reports.

Gradients are read from Adam's first moment after one step: with b1 = 0 and a clip that
is never reached, it is the gradient that the step took.
"""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from fp8rl_jax.data.batching import TokenBatch, micro_batches, token_rows
from fp8rl_jax.data.layout import pack
from fp8rl_jax.fp8 import LinearPrecision, Recipe, ScaledArray, get_recipe
from fp8rl_jax.fp8.recipe import FP8
from fp8rl_jax.fp8.weights import quantize_weights
from fp8rl_jax.grpo import LossConfig, LossInputs, Normalizer, policy_loss
from fp8rl_jax.learner import (
    Learner,
    SupervisedInputs,
    negative_log_likelihood,
)
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.models.qwen3.model import Qwen3
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.rollout import ContinuousRolloutEngine, Prompts, SamplingParams

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    tie_word_embeddings=False,
)
VOCAB_SIZE = 250
TEMPERATURE = 0.7
ROWS, WIDTH = 8, 32
# Step 0 is as small as a real run's; the later ones move the norm scales visibly.
FIRST_LR, LR = 1e-6, 1e-2

_NO_WGRAD = dataclasses.replace(FP8, linear=LinearPrecision(wgrad=False))
RECIPES = {
    "bf16": get_recipe("bf16"),
    "fp8_without_wgrad": Recipe("fp8_without_wgrad", _NO_WGRAD, _NO_WGRAD),
    "fp8": get_recipe("fp8"),
}
# Relative norm of a gradient's change with the layout of the batch. e4m3 rounds an
# element by up to 2^-4 of it, and the layout decides which tokens share a scale.
BOUNDS = {"bf16": 1e-6, "fp8_without_wgrad": 1e-6, "fp8": 2.0**-4}
MESHES = {
    "data": {"data": 8},
    "fsdp": {"data": 2, "fsdp": 4},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}


@functools.lru_cache
def learner(
    name: str, mesh: str | None = None, tied: bool = False, **options
) -> Learner:
    return Learner(
        dataclasses.replace(CONFIG, tie_word_embeddings=tied),
        RECIPES[name],
        OptimizerConfig(
            LR, warmup_steps=1, warmup_start=FIRST_LR / LR, b1=0.0, max_grad_norm=1e9
        ),
        functools.partial(policy_loss, config=LossConfig()),
        vocab_size=VOCAB_SIZE,
        temperature=TEMPERATURE,
        remat=options.pop("remat", "none"),
        mesh=None if mesh is None else make_mesh(**MESHES[mesh]),
        **options,
    )


@pytest.fixture(scope="module")
def params():
    """Host masters whose norm scales, too, are no bf16 numbers."""
    rng = np.random.default_rng(0)

    def perturb(path, x):
        noise = 0.2 * rng.normal(size=x.shape).astype(np.float32)
        return np.asarray(x) + (noise if path[-1].key == "scale" else np.float32(0))

    drawn = init_params(CONFIG, jax.random.key(0), std=0.05)
    return jax.tree.map_with_path(perturb, drawn)


@pytest.fixture(scope="module")
def batch() -> tuple[TokenBatch, LossInputs]:
    """Eight rows whose responses have from 1 to 22 tokens."""
    rng = np.random.default_rng(1)
    prompts, responses = (
        [rng.integers(VOCAB_SIZE, size=n).tolist() for n in lengths]
        for lengths in ((3, 8, 1, 5, 2, 8, 4, 6), (1, 20, 7, 3, 15, 22, 2, 9))
    )
    tokens, mask = token_rows(prompts, responses)
    assert mask.shape == (ROWS, WIDTH)
    return tokens, LossInputs(mask, rng.normal(size=ROWS).astype(np.float32))


def start(policy: Learner, params):
    """A fresh state around a copy of host masters, and its codes."""
    shardings = policy.state_shardings()
    if shardings is None:
        state = policy.init(jax.tree.map(jnp.array, params))
    else:
        state = policy.init(jax.device_put(params, shardings.params))
    return state, policy.quantize(state.params)


def step(policy: Learner, params, data, rows=ROWS, mesh: str | None = None):
    """One update of fresh masters, in micro-batches of ``rows``."""
    entered = contextlib.nullcontext()
    if mesh is not None:
        entered = jax.set_mesh(make_mesh(**MESHES[mesh]))
    with entered:
        return policy.update(
            *start(policy, params), *policy.put(micro_batches(data, rows))
        )


def gradient(result):
    return jax.device_get(optax.tree.get(result.state.opt_state, "mu"))


@pytest.fixture(scope="module")
def base(params, batch):
    """Gradient and loss of the eight rows in one micro-batch on one device."""

    @functools.lru_cache
    def compute(name):
        result = step(learner(name), params, batch)
        return gradient(result), result.metrics["loss"].item()

    return compute


def relative_differences(tree, reference) -> dict[str, float]:
    def difference(x, y):
        return np.linalg.norm(np.float64(x) - y) / np.linalg.norm(np.float64(y))

    differences = jax.tree.map(difference, tree, reference)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): value
        for path, value in jax.tree.leaves_with_path(differences)
    }


def check_same_gradient(name, result, reference):
    grads, loss = reference
    np.testing.assert_allclose(result.metrics["loss"], loss, rtol=0, atol=1e-6)
    differences = relative_differences(gradient(result), grads)
    worst = max(differences, key=differences.get)
    assert differences[worst] <= BOUNDS[name], (worst, differences[worst])
    return differences


def pad(data, rows: int, columns: int):
    """Appends empty rows and columns to every array."""

    def widen(x):
        return np.pad(x, [(0, rows), (0, columns)][: x.ndim])

    return jax.tree.map(widen, data)


ORDER = np.array([3, 1, 0, 2, 7, 6, 5, 4])


@pytest.mark.parametrize("name", RECIPES)
def test_row_order(params, batch, base, name):
    permuted = jax.tree.map(lambda x: x[ORDER], batch)
    result = step(learner(name), params, permuted)
    check_same_gradient(name, result, base(name))


@pytest.mark.parametrize(
    "name",
    [pytest.param("bf16", marks=pytest.mark.slow), "fp8_without_wgrad", "fp8"],
)
def test_micro_batches_order_and_padding_together(params, batch, base, name):
    """Four micro-batches, the last of them empty, of shuffled and padded rows."""
    data = pad(jax.tree.map(lambda x: x[ORDER], batch), rows=4, columns=16)
    result = step(learner(name), params, data, rows=3)
    differences = check_same_gradient(name, result, base(name))
    if name == "fp8":
        # The bound of this recipe is not vacuous: wgrad does run in FP8.
        assert differences["layers/mlp/gate_up_proj/kernel"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "empty_rows", "columns"),
    [(4, 0, 0), (2, 0, 0), (8, 0, 32), (8, 8, 0)],
    ids=["two", "four", "columns", "rows"],
)
@pytest.mark.parametrize("name", RECIPES)
def test_micro_batches_and_padding(
    params, batch, base, name, rows, empty_rows, columns
):
    result = step(learner(name), params, pad(batch, empty_rows, columns), rows)
    check_same_gradient(name, result, base(name))


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_packing(params, batch, base, name):
    """Three and three sequences in packed rows, two in a second micro-batch."""
    tokens, inputs = batch
    layout = pack(tokens, inputs.mask, 3 * 128, 2)
    assert layout.num_micro_batches == 2
    policy = learner(name)
    data = layout.batch, layout.take(inputs)
    # What lies beyond the count is not looked at.
    data = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), data)
    data[1].mask[2:] = False
    count = np.int32(layout.num_micro_batches)
    result = policy.update(*start(policy, params), *policy.put(data), count)
    check_same_gradient(name, result, base(name))
    packed = layout.restore(np.asarray(result.log_probs)[:2])
    rows = np.asarray(step(policy, params, batch).log_probs)[0]
    np.testing.assert_array_equal(packed[inputs.mask], rows[inputs.mask])
    state, codes = start(policy, params)
    frozen = policy.frozen_weights(state.params, codes)
    scored = policy.score(frozen, policy.put(data[0]), count)
    np.testing.assert_array_equal(np.asarray(scored)[:2], result.log_probs[:2])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name,
            mesh,
            marks=() if (name, mesh) == ("bf16", "all") else pytest.mark.slow,
        )
        for name in RECIPES
        for mesh in MESHES
    ],
)
def test_eight_devices(params, batch, base, name, mesh):
    policy = learner(name, mesh)
    result = step(policy, params, batch, mesh=mesh)
    check_same_gradient(name, result, base(name))
    placed = jax.tree.map(lambda x: x.sharding, result.state)
    same = jax.tree.map(
        lambda x, want, have: have.is_equivalent_to(want, x.ndim),
        result.state,
        policy.state_shardings(),
        placed,
    )
    assert jax.tree.all(same)


def test_state_shardings():
    """Moments lie where their masters lie; nothing needs arrays to know it."""
    policy = learner("fp8", "all")
    state = policy.abstract_state()
    kernel = state.params["layers"]["mlp"]["gate_up_proj"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 256, 64)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    where = jax.tree.map(lambda x: x.sharding, state.params)
    for moment in ("mu", "nu"):
        moments = optax.tree.get(state.opt_state, moment)
        assert jax.tree.map(lambda x: x.sharding, moments) == where
    assert state.step.sharding.is_fully_replicated
    assert learner("fp8").state_shardings() is None


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_step_of_lr_1e6_moves_the_masters(params, batch, name):
    result = step(learner(name), params, batch)
    lr = float(result.metrics["lr"])
    np.testing.assert_allclose(lr, FIRST_LR, rtol=1e-3)  # float32 schedule
    grads = gradient(result)
    for (path, new), old, g in zip(
        jax.tree.leaves_with_path(result.state.params),
        jax.tree.leaves(params),
        jax.tree.leaves(grads),
        strict=True,
    ):
        assert new.dtype == jnp.float32
        # Adam's first step, with the weight decay of what decays.
        g = np.float64(g)
        decay = 0.0 if path[-1].key == "scale" else 0.01 * np.float64(old)
        expected = old - lr * (g / (np.abs(g) + 1e-8) + decay)
        np.testing.assert_allclose(new, expected, rtol=2e-7, atol=1e-11)
        assert np.mean(np.asarray(new) != old) > 0.9 * np.mean(g != 0)


def test_codes_are_those_of_the_new_masters(params, batch):
    result = step(learner("fp8"), params, batch)

    def bits(tree):
        return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]

    new, old = quantize_weights(result.state.params), quantize_weights(params)
    for have, want in zip(bits(result.codes), bits(new), strict=True):
        np.testing.assert_array_equal(have, want)
    # Even at a learning rate of 1e-6 the scales tell the two apart.
    assert any(
        not np.array_equal(x, y) for x, y in zip(bits(new), bits(old), strict=True)
    )
    kernels = [
        x
        for x in jax.tree.leaves(
            result.codes, is_leaf=lambda x: isinstance(x, ScaledArray)
        )
        if isinstance(x, ScaledArray)
    ]
    # qkv, o, gate and up, down: stacked over the layers, each in both layouts.
    assert len(kernels) == 2 * 4
    assert jax.tree.leaves(learner("bf16").quantize(params)) == []


def test_reported_metrics(params, batch):
    """Loss by hand: on policy every ratio is 1, so it is minus the mean advantage."""
    _, inputs = batch
    result = step(learner("bf16"), params, batch)
    metrics = jax.device_get(result.metrics)
    tokens = inputs.mask.sum()
    expected = -np.sum(inputs.mask.sum(1) * np.float64(inputs.advantages)) / tokens
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert metrics["global_valid_toks"] == tokens == 79
    assert metrics["global_valid_seqs"] == ROWS
    squares = [np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(gradient(result))]
    np.testing.assert_allclose(metrics["grad_norm"], math.sqrt(sum(squares)), rtol=1e-6)
    assert metrics["finite"] == 1.0 and result.state.step == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
def test_non_finite_steps_leave_the_state_alone(params, batch, poison):
    """1e38 has a finite loss, and a gradient that overflows."""
    tokens, inputs = batch
    advantages = inputs.advantages.copy()
    advantages[2] = poison
    policy = learner("fp8")
    result = step(policy, params, (tokens, inputs._replace(advantages=advantages)))
    assert result.metrics["finite"] == 0.0
    jax.tree.map(np.testing.assert_array_equal, result.state.params, params)
    fresh, _ = start(policy, params)
    jax.tree.map(np.testing.assert_array_equal, result.state.opt_state, fresh.opt_state)
    assert result.state.step == 1
    # And the run could go on from it.
    again = policy.update(
        result.state, result.codes, *policy.put(micro_batches(batch, ROWS))
    )
    assert again.metrics["finite"] == 1.0


def test_the_old_state_and_codes_are_donated(params, batch):
    policy = learner("fp8")
    state, codes = start(policy, params)
    policy.update(state, codes, *policy.put(micro_batches(batch, ROWS)))
    assert all(x.is_deleted() for x in jax.tree.leaves((state, codes)))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_sampler_score_and_update_agree_after_updates(params, batch, name):
    """Norm scales are then no bf16 numbers in any of the three (a past bug)."""
    policy = learner(name)
    state, codes = start(policy, params)
    for _ in range(2):
        state, codes, *_ = policy.update(
            state, codes, *policy.put(micro_batches(batch, ROWS))
        )
    scale = np.asarray(state.params["layers"]["input_norm"]["scale"])
    assert np.abs(scale - params["layers"]["input_norm"]["scale"]).mean() > 1e-3

    rng = np.random.default_rng(2)
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (8, 1, 5, 3)]
    engine = ContinuousRolloutEngine(CONFIG, RECIPES[name].rollout, VOCAB_SIZE)
    rollouts = engine.generate(
        policy.rollout_weights(state.params, codes),
        Prompts(prompts, np.arange(ROWS).reshape(4, 2)),
        SamplingParams(TEMPERATURE, 24, (VOCAB_SIZE + 1,), 2),
        (0, 0),
    )
    tokens, mask = token_rows([p for p in prompts for _ in range(2)], rollouts.tokens)
    arrays = policy.put(
        micro_batches((tokens, LossInputs(mask, np.ones(ROWS, np.float32))), ROWS)
    )
    scored = policy.score(policy.frozen_weights(state.params, codes), arrays[0])
    result = policy.update(state, codes, *arrays)
    for log_probs in (scored, result.log_probs):
        log_probs = np.asarray(log_probs)[0][mask].reshape(ROWS, -1)
        np.testing.assert_array_equal(log_probs, rollouts.log_probs)


def test_temperature_and_padded_vocabulary(params, batch):
    """Log-probs are log softmax(logits / T) over the tokenizer's ids alone."""
    tokens, inputs = batch
    policy = learner("bf16")
    weights = policy.frozen_weights(params, policy.quantize(params))
    scored = policy.score(weights, policy.put(micro_batches(tokens, ROWS)))
    hidden, _ = jax.jit(
        lambda weights, batch: Qwen3(CONFIG, weights)(
            batch.tokens,
            batch.positions,
            RECIPES["bf16"].train,
            segments=batch.segments,
        )
    )(weights, tokens)
    head = np.asarray(weights["lm_head"]["kernel"]).astype(np.float64)[:VOCAB_SIZE]
    logits = np.asarray(hidden).astype(np.float64) @ head.T / TEMPERATURE
    logits -= logits.max(-1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(expected, tokens.targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        np.asarray(scored)[0][inputs.mask], expected[inputs.mask], rtol=1e-6, atol=2e-6
    )


def test_tied_embedding_is_one_leaf_with_both_gradients(params, batch):
    embedding = params["embed"]["embedding"]
    tied = {name: x for name, x in params.items() if name != "lm_head"}
    untied = params | {"lm_head": {"kernel": embedding.copy()}}
    result = step(learner("bf16", tied=True), tied, batch)
    assert "lm_head" not in result.state.params
    both = gradient(step(learner("bf16"), untied, batch))
    expected = np.float64(both["embed"]["embedding"]) + both["lm_head"]["kernel"]
    np.testing.assert_allclose(
        gradient(result)["embed"]["embedding"], expected, rtol=1e-4, atol=1e-7
    )


def test_supervised_loss():
    log_probs = jnp.array([[-1.0, -2.0, jnp.nan], [-4.0, jnp.inf, -0.5]], jnp.float32)
    mask = jnp.array([[1, 1, 0], [1, 0, 0]], bool)
    loss, metrics = negative_log_likelihood(
        log_probs, SupervisedInputs(mask), Normalizer.from_mask(mask)
    )
    np.testing.assert_allclose(loss, (1 + 2 + 4) / 3, rtol=1e-6)
    assert metrics["loss"] == loss
    # Two micro-batches add up to the whole.
    halves = [
        negative_log_likelihood(
            log_probs[i : i + 1],
            SupervisedInputs(mask[i : i + 1]),
            Normalizer.from_mask(mask),
        )[0]
        for i in range(2)
    ]
    np.testing.assert_allclose(sum(halves), loss, rtol=1e-6)


@pytest.mark.parametrize("decay_steps", [0, 30])
def test_schedule(decay_steps):
    peak, warmup, first = 2e-4, 10, 0.1
    schedule = OptimizerConfig(
        peak, warmup_steps=warmup, warmup_start=first, decay_steps=decay_steps
    ).schedule()
    for count in range(40):
        if count < warmup:
            expected = peak * (first + (1 - first) * count / warmup)
        elif decay_steps:
            progress = min((count - warmup) / (decay_steps - warmup), 1.0)
            expected = peak * 0.5 * (1 + math.cos(math.pi * progress))
        else:
            expected = peak
        np.testing.assert_allclose(schedule(count), expected, rtol=1e-5, atol=1e-11)


def test_no_warmup_starts_at_the_peak():
    assert OptimizerConfig(3e-4).schedule()(0) == np.float32(3e-4)


def adamw(grads, start, lr, b1, b2, eps, decay):
    """AdamW in float64 (Loshchilov and Hutter, arXiv:1711.05101, alg. 2)."""
    x, m, v = np.float64(start), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = np.float64(g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        x = x - lr * (m_hat / (np.sqrt(v_hat) + eps) + decay * x)
    return x


def test_optimizer_clips_by_the_global_norm_and_decays_kernels_only():
    config = OptimizerConfig(
        0.01, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, max_grad_norm=1.0
    )
    tx = config.transform()
    params = {
        "norm": {"scale": jnp.array([1.0, 2.0], jnp.float32)},
        "o_proj": {"kernel": jnp.array([[3.0, -4.0]], jnp.float32)},
    }
    # Global norms 13 and 0.5: clipped, then not.
    grads = [
        {"norm": {"scale": [3.0, 4.0]}, "o_proj": {"kernel": [[0.0, 12.0]]}},
        {"norm": {"scale": [0.3, 0.0]}, "o_proj": {"kernel": [[0.0, 0.4]]}},
    ]
    state, x = tx.init(params), params
    with jax.numpy_dtype_promotion("standard"):
        for g in grads:
            g = jax.tree.map(
                lambda leaf: jnp.array(leaf, jnp.float32),
                g,
                is_leaf=lambda leaf: isinstance(leaf, list),
            )
            updates, state = tx.update(g, state, x)
            x = optax.apply_updates(x, updates)
    for name, leaf, decay in (("norm", "scale", 0.0), ("o_proj", "kernel", 0.5)):
        clipped = [
            np.array(grads[0][name][leaf]) / 13.0,
            np.array(grads[1][name][leaf]),
        ]
        expected = adamw(clipped, params[name][leaf], 0.01, 0.8, 0.9, 1e-3, decay)
        np.testing.assert_allclose(x[name][leaf], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"warmup_steps": 10, "decay_steps": 10}, "must exceed"),
    ],
)
def test_bad_optimizers_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        OptimizerConfig(**{"learning_rate": 1e-3} | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"remat": "some"}, "choose one of none, full, attention, dots"),
        ({"temperature": 0.0}, "must be positive"),
        ({"mesh": {"data": 1, "tensor": 8}}, "does not divide into 8 shards"),
    ],
)
def test_bad_learners_are_refused(changes, match):
    if "mesh" in changes:
        # 8 shards of 128 are possible, 8 of the 100 padded ids are not.
        changes = {"mesh": make_mesh(**changes["mesh"])}
        config = dataclasses.replace(CONFIG, vocab_size=100)
    else:
        config = CONFIG
    with pytest.raises(ValueError, match=match):
        Learner(
            config,
            RECIPES["fp8"],
            OptimizerConfig(1e-3),
            negative_log_likelihood,
            vocab_size=100,
            **changes,
        )
