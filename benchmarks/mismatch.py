"""How far sampler and trainer log-probs lie apart, and which op parts them.

    python -m benchmarks.mismatch --size=0.6b --recipe=fp8

Random weights sample completions; the trainer's forward pass and its update step score
the same tokens. The first table gives the differences of log-probs, also between
batches of another size on the same side. The second follows every op through the first
``--trace_layers`` layers: the sampler's prefill and its single-token decoding over the
cache, each against the trainer's full forward pass. ``own`` is what the op alone
does, on the trainer's inputs; the columns before it hold what ops before it brought in
as well. Every difference is 0 on CPU, and under fp8 on a Hopper GPU; the fp8 and bf16
recipes alone are meant to agree elsewhere. ``--num_layers`` and ``--prompt_length``
vary the model and the context; ``--trace_layers=0`` leaves the second table out.

Hardware: any; one GPU of 24 GB for 0.6b. ``--size=small`` runs on a CPU in half a
minute.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float, PyTree

from benchmarks.layer_trace import HEAD_OPS, LAYER_OPS, Values, trace
from fp8rl_jax.attention import KVCache, page_size
from fp8rl_jax.console import print_table
from fp8rl_jax.data.batching import (
    TokenBatch,
    micro_batches,
    place_on_targets,
    token_rows,
)
from fp8rl_jax.fp8 import Precision, Recipe, get_recipe
from fp8rl_jax.fp8.recipe import RECIPES
from fp8rl_jax.grpo import LossConfig, LossInputs, policy_loss
from fp8rl_jax.learner import Learner
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.rollout import ContinuousRolloutEngine, Prompts, Rollouts, SamplingParams

_SMALL = Qwen3Config(
    vocab_size=384,
    hidden_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=384,
    tie_word_embeddings=True,
)

_SIZE = flags.DEFINE_enum("size", "small", ["small", *QWEN3_SIZES], "Size of model.")
_RECIPE = flags.DEFINE_enum("recipe", "fp8", list(RECIPES), "What runs in FP8.")
_PROMPTS = flags.DEFINE_integer("prompts", 4, "Prompts.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Samples a prompt.", lower_bound=1)
_PROMPT_LENGTH = flags.DEFINE_integer("prompt_length", 100, "Tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Tokens.", lower_bound=1)
_NUM_LAYERS = flags.DEFINE_integer("num_layers", None, "In place of the size's own.")
_TRACE_LAYERS = flags.DEFINE_integer("trace_layers", 4, "Layers traced; 0: no table.")
_TRACE_STEPS = flags.DEFINE_integer("trace_steps", 4, "Decoded tokens traced.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, prompts and samples.")


def random_params(config: Qwen3Config, seed: int) -> PyTree[Array]:
    """Float32 weights whose norms scale by more than 1 and whose logits are not flat.

    Kernels are N(0, 0.02^2). Norm scales, all 1 at initialisation, are drawn log-normal
    as trained ones are spread; the final norm's are four times larger.
    """
    key = jax.random.key(seed)

    def perturb(path, x):
        names = [p.key for p in path]
        if names[-1] != "scale":
            return x
        fold = sum(map(ord, "/".join(names)))
        noise = jax.random.normal(jax.random.fold_in(key, fold), x.shape, x.dtype)
        return (4.0 if names[0] == "final_norm" else 1.0) * jnp.exp(0.3 * noise)

    return jax.tree.map_with_path(perturb, init_params(config, key))


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured: a policy and the tokens it drew."""

    config: Qwen3Config
    recipe: Recipe
    learner: Learner
    params: PyTree[Array]
    prompts: list[list[int]]
    rollouts: Rollouts
    batch: TokenBatch
    mask: np.ndarray

    @property
    def vocab_size(self) -> int:
        """The last id is the stop id, which is never drawn: all rows are full."""
        return self.config.vocab_size - 1

    @property
    def rollout_log_probs(self) -> Float[np.ndarray, "R T"]:
        """The sampler's log-probs at the positions of their targets."""
        return place_on_targets(self.rollouts.log_probs, self.mask)


def make_subject(
    config: Qwen3Config,
    recipe: Recipe,
    num_prompts: int,
    num_samples: int,
    prompt_length: int,
    new_tokens: int,
    seed: int,
) -> Subject:
    """Draws weights, prompts and completions."""
    learner = Learner(
        config,
        recipe,
        OptimizerConfig(learning_rate=1e-6),
        functools.partial(policy_loss, config=LossConfig(old_policy="rollout")),
        vocab_size=config.vocab_size - 1,
    )
    params = random_params(config, seed)
    rng = np.random.default_rng(seed)
    ids = rng.integers(config.vocab_size - 1, size=(num_prompts, prompt_length))
    prompts = ids.tolist()
    rollouts = sample(config, recipe, learner, params, prompts, num_samples, new_tokens)
    repeated = [p for p in prompts for _ in range(num_samples)]
    batch, mask = token_rows(repeated, list(rollouts.tokens))
    return Subject(config, recipe, learner, params, prompts, rollouts, batch, mask)


def sample(
    config: Qwen3Config,
    recipe: Recipe,
    learner: Learner,
    params: PyTree[Array],
    prompts: list[list[int]],
    num_samples: int,
    new_tokens: int,
) -> Rollouts:
    """Draws completions of exactly ``new_tokens`` tokens."""
    vocab_size = config.vocab_size - 1
    sampling = SamplingParams(1.0, new_tokens, (vocab_size,), num_samples)
    sample_ids = np.arange(len(prompts) * num_samples).reshape(-1, num_samples)
    weights = learner.rollout_weights(params, learner.quantize(params))
    engine = ContinuousRolloutEngine(config, recipe.rollout, vocab_size)
    return engine.generate(weights, Prompts(prompts, sample_ids), sampling, (0, 0))


def log_prob_table(subject: Subject) -> list[dict[str, str | float]]:
    """Differences of log-probs between sampler, scoring and update.

    The update consumes a copy of the parameters.
    """
    s, learner = subject, subject.learner
    rows = len(s.mask)
    sampled = s.rollout_log_probs[s.mask]
    codes = learner.quantize(s.params)
    frozen = learner.frozen_weights(s.params, codes)

    def score(rows_per_batch):
        batch = learner.put(micro_batches(s.batch, rows_per_batch))
        scored = np.asarray(learner.score(frozen, batch))
        return scored.reshape(s.mask.shape)[s.mask]

    scored, scored_alone = score(rows), score(1)
    alone = sample(
        s.config,
        s.recipe,
        learner,
        s.params,
        s.prompts[:1],
        1,
        s.rollouts.tokens.shape[1],
    )
    # Beyond the first other token the two completions are different texts.
    same = np.cumprod(alone.tokens[0] == s.rollouts.tokens[0]).astype(bool)
    advantages = np.random.default_rng(0).normal(size=rows).astype(np.float32)
    inputs = LossInputs(s.mask, advantages, rollout_log_probs=s.rollout_log_probs)
    state = learner.init(jax.tree.map(jnp.copy, s.params))
    arrays = learner.put(micro_batches((s.batch, inputs), rows))
    result = learner.update(state, codes, *arrays)
    updated = np.asarray(result.log_probs).reshape(s.mask.shape)[s.mask]
    return [
        _log_prob_row("score - sampler", scored - sampled),
        _log_prob_row("update - sampler", updated - sampled),
        _log_prob_row("update - score", updated - scored),
        _log_prob_row("score, one row - all rows", scored_alone - scored),
        _log_prob_row(
            "sampler, one row - all rows",
            (alone.log_probs[0] - s.rollouts.log_probs[0])[same],
        ),
    ]


def _log_prob_row(name: str, d: Float[np.ndarray, "N"]) -> dict[str, str | float]:
    d = d.astype(np.float64)
    return {
        "log-probs": name,
        "tokens": float(d.size),
        "equal": f"{np.mean(d == 0):.1%}",
        "mean |d|": f"{np.abs(d).mean():.3g}",
        "p99 |d|": f"{np.quantile(np.abs(d), 0.99):.3g}",
        "max |d|": f"{np.abs(d).max():.3g}",
        "k3": f"{np.mean(np.expm1(d) - d):.3g}",
    }


@jax.jit
def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """Per leading index: share of differing elements, largest difference."""
    axes = tuple(range(1, a.ndim))
    gap = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.mean(a != b, axes, dtype=jnp.float32), jnp.max(gap, axes)


def _empty_cache(
    config: Qwen3Config, precision: Precision, batch: int, num_slots: int
) -> KVCache:
    """Rows that each have pages of their own, one after the other."""
    page = page_size(num_slots, jax.devices()[0].platform)
    pages = -(-num_slots // page)
    table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    return KVCache.create(
        config.num_layers,
        batch * pages,
        config.num_kv_heads,
        page,
        config.head_dim,
        table,
        precision,
        jnp.dtype(config.dtype),
    )


@functools.partial(jax.jit, static_argnames=("config", "precision", "num_slots"))
def _filled_cache(
    config: Qwen3Config, precision: Precision, layers: Values, num_slots: int
) -> KVCache:
    """A cache that holds the keys and values of a trace."""
    k = layers["k_norm_rope"]
    v = layers["v"]
    num_layers, batch, length = k.shape[:3]
    cache = _empty_cache(config, precision, batch, num_slots)
    positions = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (batch, length)
    )
    where = cache.place(positions)
    for layer in range(num_layers):
        cache = cache.store(jnp.int32(layer), k[layer], v[layer], where)
    return cache


def _padded(x: Array, multiple: int) -> Array:
    """[B, T, ...] with T padded by zeros."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % multiple)
    return jnp.pad(x, widths)


def op_table(
    subject: Subject, num_layers: int, num_steps: int
) -> list[dict[str, str | float]]:
    """Differences of every op between the sampler's two phases and the trainer."""
    s = subject
    config = dataclasses.replace(s.config, num_layers=num_layers)
    params = s.params | {
        "layers": jax.tree.map(lambda x: x[:num_layers], s.params["layers"])
    }
    codes = s.learner.quantize(params)
    evaluate = functools.partial(jax.jit, static_argnames=("config", "precision"))(
        functools.partial(trace, vocab_size=s.vocab_size)
    )
    sampler = functools.partial(
        evaluate,
        config,
        s.recipe.rollout,
        s.learner.rollout_weights(params, codes),
    )
    tokens, targets, positions = (jnp.asarray(x) for x in s.batch[:3])
    trained, _ = evaluate(
        config,
        s.recipe.train,
        s.learner.frozen_weights(params, codes),
        tokens,
        targets,
        positions,
        None,
    )

    def known(start, stop, every=1):
        layers, head = trained
        return (
            {name: x[:, ::every, start:stop] for name, x in layers.items()},
            {name: x[::every, start:stop] for name, x in head.items()},
        )

    num_samples = len(s.mask) // len(s.prompts)
    prompt_length = len(s.prompts[0])
    num_slots = prompt_length + s.rollouts.tokens.shape[1]
    page = page_size(num_slots, jax.devices()[0].platform)
    gaps = {
        name: {op: [] for op in (*LAYER_OPS, *HEAD_OPS)}
        for name in ("prefill", "prefill, own", "decode", "decode, own")
    }

    def compare(name, values, expected):
        for ours, theirs, ops in zip(
            values, expected, (LAYER_OPS, HEAD_OPS), strict=True
        ):
            for op in ops:
                a, b = ours[op], theirs[op]
                if ops is HEAD_OPS:
                    a, b = a[None], b[None]
                gaps[name][op].append(jax.device_get(_difference(a, b)))

    def prefill(every, recorded=None):
        """Of the prompt, padded as the engine pads it."""
        inputs = [_padded(x[::every, :prompt_length], page) for x in (tokens, targets)]
        at = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None]
        at = jnp.broadcast_to(at, inputs[0].shape)
        if recorded is not None:
            layers, head = recorded
            layers = {
                name: jax.vmap(functools.partial(_padded, multiple=page))(x)
                for name, x in layers.items()
            }
            head = {name: _padded(x, page) for name, x in head.items()}
            recorded = layers, head
        cache = _empty_cache(config, s.recipe.rollout, len(at), num_slots)
        (layers, head), cache = sampler(*inputs, at, cache, recorded=recorded)
        layers = {name: x[:, :, :prompt_length] for name, x in layers.items()}
        head = {name: x[:, :prompt_length] for name, x in head.items()}
        return (layers, head), cache

    # The prompt alone, one row for its samples, as the sampler prefills it.
    expected = known(0, prompt_length, num_samples)
    compare("prefill", prefill(num_samples)[0], expected)
    compare("prefill, own", prefill(num_samples, expected)[0], expected)
    _, cache = prefill(1)
    trained_cache = _filled_cache(config, s.recipe.rollout, trained[0], num_slots)
    for t in range(prompt_length, prompt_length + num_steps):
        inputs = [x[:, t : t + 1] for x in (tokens, targets, positions)]
        expected = known(t, t + 1)
        values, cache = sampler(*inputs, cache)
        compare("decode", values, expected)
        values, _ = sampler(*inputs, trained_cache, recorded=expected)
        compare("decode, own", values, expected)
    return [_op_row(op, gaps) for op in (*LAYER_OPS, *HEAD_OPS)]


def _op_row(op: str, gaps) -> dict[str, str]:
    row = {"op": op}
    for name, by_op in gaps.items():
        shares, largest = (np.stack(x) for x in zip(*by_op[op], strict=True))
        differs = np.flatnonzero(shares.max(0))
        if not len(differs):
            row[name] = "0"
            continue
        where = f" from layer {differs[0]}" if op in LAYER_OPS else ""
        row[name] = f"{shares.mean():.2%}, max {largest.max():.2g}{where}"
    return row


def main(argv):
    """Prints both tables."""
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    config = _SMALL if _SIZE.value == "small" else QWEN3_SIZES[_SIZE.value]
    if _NUM_LAYERS.value is not None:
        config = dataclasses.replace(config, num_layers=_NUM_LAYERS.value)
    num_steps = min(_TRACE_STEPS.value, _NEW_TOKENS.value - 1)
    subject = make_subject(
        config,
        get_recipe(_RECIPE.value),
        _PROMPTS.value,
        _SAMPLES.value,
        _PROMPT_LENGTH.value,
        _NEW_TOKENS.value,
        _SEED.value,
    )
    title = (
        f"{_SIZE.value}, {config.num_layers} layers, {_RECIPE.value}, "
        f"{jax.devices()[0].device_kind}, {_PROMPTS.value} prompts of "
        f"{_PROMPT_LENGTH.value} x {_SAMPLES.value} completions of "
        f"{_NEW_TOKENS.value} tokens"
    )
    num_layers = min(_TRACE_LAYERS.value, config.num_layers)
    print_table(log_prob_table(subject), title)
    if not num_layers:
        return
    print_table(
        op_table(subject, num_layers, num_steps),
        f"Differing elements, sampler against trainer: {num_layers} layers, "
        f"{num_steps} decoded tokens",
    )


if __name__ == "__main__":
    app.run(main)
