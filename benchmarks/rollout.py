"""Speed of the rollout engine, log-probs of the drawn tokens included.

    python -m benchmarks.rollout --recipe=fp8 --workload=w1 --workload=w2
    python -m benchmarks.rollout --recipe=fp8 --workload=w2 --slots=256
    python -m benchmarks.rollout --recipe=bf16 --workload=step --context=8192 --slots=80

Random weights. Workloads, as vLLM was measured with:

* w1: 32 prompts of 256 tokens x 16 samples, exactly 1,024 tokens each.
* w2: the same prompts, 64 to 4,096 tokens each, log-normal around 735: 511,803 in all.
* step: bursts of decode steps of ``--slots`` sequences of ``--context`` tokens that
  share nothing, without a queue: what a step costs where contexts are long.

Programs are compiled by a short run before. Another run, of 512 tokens a sample, tells
the time outside of kernels: the share of its seconds in which none ran, from opening
the session on.

Hardware: one Hopper GPU with 140 GB for 8b; three minutes a recipe.
"""

import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax._src.lib import mosaic_gpu
from jaxtyping import PyTree

from fp8rl_jax.console import print_table
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.fp8.recipe import RECIPES
from fp8rl_jax.fp8.weights import quantize_weights, sampling_weights
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.rollout import (
    ContinuousRolloutEngine,
    EngineLimits,
    Request,
    SamplingParams,
)
from fp8rl_jax.rollout.programs import Policy, Rows, create_pool, decode, page_bytes

_WORKLOADS = flags.DEFINE_multi_enum(
    "workload", ["w1"], ["w1", "w2", "step"], "What to sample."
)
_SIZE = flags.DEFINE_enum("size", "8b", list(QWEN3_SIZES), "Size of model.")
_RECIPE = flags.DEFINE_enum("recipe", "fp8", list(RECIPES), "What runs in FP8.")
_SLOTS = flags.DEFINE_multi_integer("slots", [512], "Sequences at once.")
_CONTEXTS = flags.DEFINE_multi_integer("context", [8192], "Tokens, for step.")
_DECODE_STEPS = flags.DEFINE_integer("decode_steps", 16, "Of a burst.", lower_bound=1)

_PROMPTS, _SAMPLES, _PROMPT_LENGTH = 32, 16, 256
_VOCAB_SIZE = 151_669
_NEVER_DRAWN = 151_935
_PAGE = 128


def make_weights(config: Qwen3Config, name: str) -> PyTree:
    """Random weights as the engine reads them."""
    precision = get_recipe(name).rollout

    @jax.jit
    def make(key):
        params = init_params(config, key)
        return sampling_weights(params, quantize_weights(params), precision.linear)

    return jax.block_until_ready(make(jax.random.key(0)))


def lengths_of(workload: str) -> list[int]:
    """Tokens that each sample of a workload has."""
    count = _PROMPTS * _SAMPLES
    if workload == "w1":
        return [1024] * count
    drawn = np.random.default_rng(0).lognormal(np.log(735), 0.85, count)
    return np.clip(np.rint(drawn), 64, 4096).astype(int).tolist()


def requests_of(lengths: list[int]) -> list[Request]:
    """One request a sample, since each has its own length; prompts are shared."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 150_000, (_PROMPTS, _PROMPT_LENGTH)).tolist()
    return [
        Request(
            prompts[i // _SAMPLES],
            SamplingParams(max_new_tokens=length, stop_ids=(_NEVER_DRAWN,)),
            (i,),
        )
        for i, length in enumerate(lengths)
    ]


def sample(engine, weights, requests, step):
    """Tokens drawn, seconds, the session's metrics and capacity."""
    start = time.perf_counter()
    with engine.session(
        weights,
        (0, step),
        max_length=_PROMPT_LENGTH + 4096,
        longest_prompt=_PROMPT_LENGTH,
        num_prompts=_PROMPTS,
        num_sequences=len(requests),
    ) as session:
        for request in requests:
            session.submit(request)
        completions = session.run()
        metrics, capacity = session.metrics(), session.capacity
    seconds = time.perf_counter() - start
    tokens = sum(len(c.tokens) for c in completions)
    expected = sum(r.sampling.max_new_tokens for r in requests)
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens were drawn, not {expected}.")
    return tokens, seconds, metrics, capacity


def busy_share(fn) -> float:
    """Share of the seconds of ``fn()`` in which kernels ran."""
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    start = time.perf_counter()
    try:
        fn()
        seconds = time.perf_counter() - start
    finally:
        kernels = cupti._cupti_get_timings(False)
    return sum(milliseconds for _, milliseconds in kernels) / 1e3 / seconds


def measure_workload(
    config: Qwen3Config, weights: PyTree, workload: str, slots: int
) -> dict[str, str]:
    """A row of the table."""
    engine = ContinuousRolloutEngine(
        config,
        get_recipe(_RECIPE.value).rollout,
        _VOCAB_SIZE,
        limits=EngineLimits(max_slots=slots, decode_steps=_DECODE_STEPS.value),
    )
    start = time.perf_counter()
    count = _PROMPTS * _SAMPLES
    bursts = [1] * count
    if workload == "w2":
        # Ends half of the sequences, then half of the rest: all sizes of programs.
        bursts = [1 + min(int(np.log2(count / (count - i))), 4) for i in range(count)]
    warm_up = requests_of([_DECODE_STEPS.value * n for n in bursts])
    sample(engine, weights, warm_up, 0)
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    requests = requests_of(lengths_of(workload))
    tokens, seconds, metrics, capacity = sample(engine, weights, requests, 1)
    print(capacity, metrics, flush=True)
    short = requests_of([512] * count)
    share = busy_share(lambda: sample(engine, weights, short, 2))
    return {
        "workload": workload,
        "recipe": _RECIPE.value,
        "slots": str(capacity.num_slots),
        "tokens": f"{tokens:,}",
        "s": f"{seconds:.2f}",
        "tok/s": f"{tokens / seconds:,.0f}",
        "slot use": f"{metrics['rollout/slot_use_until_queue_empty']:.1%}",
        "outside kernels": f"{1 - share:.1%}",
        "KV tokens": f"{capacity.num_pages * capacity.page_size:,}",
    }


def measure_step(
    config: Qwen3Config, weights: PyTree, context: int, rows: int
) -> dict[str, str]:
    """A row of the table: bursts at one context."""
    policy = Policy(config, get_recipe(_RECIPE.value).rollout, _VOCAB_SIZE)
    steps = _DECODE_STEPS.value
    pages = -(-(context + 2 * steps) // _PAGE)
    pool = create_pool(policy, rows * pages, _PAGE)
    keys = jax.random.split(jax.random.key(0), len(pool))

    @jax.jit
    def layer_of(x, key):
        noise = jax.random.normal(key, x.shape[1:], jnp.bfloat16)
        return (
            abs(noise).astype(x.dtype)
            if x.dtype == jnp.float32
            else noise.astype(x.dtype)
        )

    fill = jax.jit(lambda x, i, y: x.at[i].set(y), donate_argnums=0)
    pool = list(pool)
    for i, key in enumerate(keys):
        layer = layer_of(pool[i], key)
        for n in range(config.num_layers):
            pool[i] = fill(pool[i], n, layer)
    table = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)

    def burst_rows(position):
        ints = lambda x: np.full(rows, x, np.int32)  # noqa: E731
        return Rows(
            tokens=np.arange(rows, dtype=np.int32),
            positions=ints(position),
            limits=ints(context + 2 * steps - 1),
            sample_ids=np.arange(rows, dtype=np.int32),
            temperature=np.ones(rows, np.float32),
            top_k=ints(0),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            stop_ids=np.full((rows, 1), -1, np.int32),
            page_table=table.astype(np.int32),
        )

    pool, times = tuple(pool), []
    for _ in range(6):
        start = time.perf_counter()
        pool, drawn = decode(
            weights,
            pool,
            burst_rows(context - 1),
            (np.uint32(0), np.uint32(0)),
            num_steps=steps,
            truncated=False,
            policy=policy,
        )
        counts = np.asarray(drawn.counts)
        times.append((time.perf_counter() - start) / steps)
    assert (counts == steps).all()
    times = times[1:]  # the first compiled
    step = statistics.median(times)
    kv = rows * pages * page_bytes(config, policy.precision, _PAGE)
    return {
        "workload": f"step at {context}",
        "recipe": _RECIPE.value,
        "slots": str(rows),
        "ms": f"{step * 1e3:.2f} [{min(times) * 1e3:.2f}, {max(times) * 1e3:.2f}]",
        "tok/s": f"{rows / step:,.0f}",
        "KV": f"{kv / 1e9:.1f} GB",
    }


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    config = QWEN3_SIZES[_SIZE.value]
    weights = make_weights(config, _RECIPE.value)
    title = f"{_SIZE.value}, {jax.devices()[0].device_kind}"
    for workload in _WORKLOADS.value:
        table = []
        kinds = _CONTEXTS.value if workload == "step" else [workload]
        measure = measure_step if workload == "step" else measure_workload
        for kind, slots in itertools.product(kinds, _SLOTS.value):
            table.append(measure(config, weights, kind, slots))
            print(table[-1], flush=True)
        print_table(table, title)


if __name__ == "__main__":
    app.run(main)
