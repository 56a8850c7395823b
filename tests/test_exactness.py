"""One quantised policy: sampler and trainer log-probs differ by exactly 0.

The sampler decodes token by token over its cache inside one while loop; the trainer
scores whole rows (padded, packed, rematerialised, in micro-batches) inside the jitted
optimiser step. Both evaluate the same function of the same weights, so every log-prob
that the sampler records must come out of the step bit for bit. The last tests break one
rule of `numerics` or of quantisation at a time and require the comparison to notice.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8rl_jax import numerics
from fp8rl_jax.data.batching import TokenBatch, micro_batches
from fp8rl_jax.fp8 import BLOCK, ScaledArray, get_recipe, quantize
from fp8rl_jax.grpo import LossConfig, LossInputs, policy_loss
from fp8rl_jax.learner import Learner
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.rollout import ContinuousRolloutEngine, Prompts, SamplingParams

# Two blocks of 128 along every contraction, four padding rows in the head.
CONFIG = Qwen3Config(
    vocab_size=384,
    hidden_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    tie_word_embeddings=True,
)
VOCAB_SIZE = 380
NEVER_DRAWN = 383
TEMPERATURES = {"bf16": 1.3, "fp8": 0.7}
RECIPE_NAMES = pytest.mark.parametrize("name", ["bf16", "fp8"])


@pytest.fixture(scope="module")
def params():
    # Wide enough that the logits are far from flat.
    params = init_params(CONFIG, jax.random.key(0), std=0.05)

    def train_norms(path, x):
        """Norm scales that bfloat16 does not hold, as after an update."""
        if path[-1].key != "scale":
            return x
        return x * (1.0 + 0.1 * jax.random.normal(jax.random.key(1), x.shape))

    return jax.tree.map_with_path(train_norms, params)


@functools.lru_cache
def learner(name: str, remat: str) -> Learner:
    """The real learner, with the sampler's log-probs as the old policy."""
    loss = LossConfig(old_policy="rollout")
    return Learner(
        CONFIG,
        get_recipe(name),
        OptimizerConfig(learning_rate=1e-3),
        functools.partial(policy_loss, config=loss),
        vocab_size=VOCAB_SIZE,
        temperature=TEMPERATURES[name],
        remat=remat,
    )


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A prompt, its response and the sampler's log-probs of the response."""

    prompt: list[int]
    response: list[int]
    log_probs: np.ndarray

    def cut(self, length: int) -> "Sequence":
        """Keeps the first ``length`` tokens of the response."""
        return Sequence(self.prompt, self.response[:length], self.log_probs[:length])


def sample(params, name, prompt_lengths, num_samples, length) -> list[Sequence]:
    """Responses of ``length`` tokens to random prompts."""
    policy = learner(name, "full")
    weights = policy.rollout_weights(params, policy.quantize(params))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in prompt_lengths]
    ids = np.arange(len(prompts) * num_samples).reshape(-1, num_samples)
    # No stop id can be drawn, so every response has the full length.
    sampling = SamplingParams(TEMPERATURES[name], length, (NEVER_DRAWN,), num_samples)
    engine = ContinuousRolloutEngine(CONFIG, get_recipe(name).rollout, VOCAB_SIZE)
    rollouts = engine.generate(weights, Prompts(prompts, ids), sampling, (0, 0))
    assert (rollouts.lengths == length).all()
    return [
        Sequence(prompts[row // num_samples], tokens.tolist(), log_probs)
        for row, (tokens, log_probs) in enumerate(
            zip(rollouts.tokens, rollouts.log_probs, strict=True)
        )
    ]


@pytest.fixture(scope="module")
def six_of_300(params):
    """Six responses of 300 tokens per recipe, sampled once.

    Prompts of one token, of part of a block of 128, and of more than one block.
    """
    return functools.lru_cache(lambda name: sample(params, name, (1, 5, 140), 2, 300))


def lay_out(rows: list[list[Sequence]], width: int):
    """The trainer's view: each sequence starts at the next multiple of 128 of its row.

    Returns:
      TokenBatch and LossInputs of [rows, width].
    """
    shape = (len(rows), width)
    batch = TokenBatch(*(np.zeros(shape, np.int32) for _ in range(4)))
    mask, log_probs = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, sequences in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(sequences, 1):
            ids = sequence.prompt + sequence.response
            stop = start + len(ids)
            batch.tokens[row, start:stop] = ids
            batch.targets[row, start : stop - 1] = ids[1:]
            batch.positions[row, start:stop] = np.arange(len(ids))
            batch.segments[row, start:stop] = segment
            mask[row, stop - 1 - len(sequence.response) : stop - 1] = True
            log_probs[row, stop - 1 - len(sequence.response) : stop - 1] = (
                sequence.log_probs
            )
            start = math.ceil(stop / BLOCK) * BLOCK
    advantages = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return batch, LossInputs(mask, advantages, rollout_log_probs=log_probs)


def differences(params, name, rows, width, *, remat, rows_per_micro_batch=None):
    """Log-probs of the jitted optimiser step minus those of the sampler.

    Returns:
      One difference per response token, and the step's metrics.
    """
    policy = learner(name, remat)
    data = lay_out(rows, width)
    state = policy.init(jax.tree.map(jnp.copy, params))  # the update donates it
    result = policy.update(
        state,
        policy.quantize(params),
        *policy.put(micro_batches(data, rows_per_micro_batch or len(rows))),
    )
    assert result.metrics["finite"] and result.metrics["grad_norm"] > 0
    inputs = data[1]
    log_probs = np.asarray(result.log_probs).reshape(inputs.mask.shape)
    return (log_probs - inputs.rollout_log_probs)[inputs.mask], result.metrics


@RECIPE_NAMES
def test_every_response_length_up_to_300(params, six_of_300, name):
    """Token t of a response is the last one of a response of length t."""
    sequences = six_of_300(name)
    assert np.std([s.log_probs for s in sequences]) > 0.5  # far from flat
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 3, 1]):
        found, metrics = differences(
            params,
            name,
            [[sequences[i]] for i in order],
            width=448,
            remat="full",
            rows_per_micro_batch=3,
        )
        assert found.size == 6 * 300
        np.testing.assert_array_equal(found, 0.0)
        # What the training loop reports of it: the policy ratio is exactly 1.
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


@RECIPE_NAMES
def test_packed_rows_of_cut_responses(params, six_of_300, name):
    """Responses of several lengths share one row, without rematerialisation."""
    sequences = six_of_300(name)
    # 127 tokens after a prompt of one fill a block exactly.
    lengths = {4: 200, 0: 127, 2: 1, 3: 129, 1: 128, 5: 2}
    row = [sequences[i].cut(length) for i, length in lengths.items()]
    found, _ = differences(params, name, [row], width=1408, remat="none")
    assert found.size == sum(lengths.values())
    np.testing.assert_array_equal(found, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize(
    ("layout", "width"),
    [
        ([[0]], 301),
        ([[3]], 512),
        ([[2], [0], [1]], 333),
        ([[0, 2, 4], [1, 3, 5]], 1280),
        ([[0, 2], [4], [1, 3], [5]], 768),
    ],
    ids=["alone", "padded", "three", "packed", "half-packed"],
)
@RECIPE_NAMES
def test_any_layout_and_remat(params, six_of_300, name, layout, width, remat):
    sequences = six_of_300(name)
    rows = [[sequences[i] for i in members] for members in layout]
    found, _ = differences(params, name, rows, width, remat=remat)
    np.testing.assert_array_equal(found, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 64, 127, 129, 256])
@RECIPE_NAMES
def test_sampling_to_other_lengths(params, name, length):
    """Other prompt counts and cache lengths than in the run to 300 tokens."""
    rows = [[s] for s in sample(params, name, (33, 2), 2, length)]
    found, _ = differences(params, name, rows, width=33 + length, remat="full")
    np.testing.assert_array_equal(found, 0.0)


def differences_of_one_response(params, name):
    """One response of 160 tokens, sampled alone and trained on alone.

    The hardest case: XLA turns products with one row into a kernel of its own.
    """
    (sequence,) = sample(params, name, (40,), 1, 160)
    found, _ = differences(params, name, [[sequence]], width=256, remat="dots")
    assert found.size == 160
    return found


@RECIPE_NAMES
def test_one_response_alone(params, name):
    np.testing.assert_array_equal(differences_of_one_response(params, name), 0.0)


@pytest.fixture
def fresh_programs():
    """Lets a patch take effect in the programs traced from here on, and only there."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def share_that_differs(found) -> float:
    """Printed too: `pytest -s -k noticed` gives docs/numerics.md its table."""
    share = np.mean(found != 0.0)
    print(f"{share:.1%} of {found.size} tokens, at most {np.abs(found).max():.2g}")
    return share


def _dot_float32(dtype, a, b, dimension_numbers):
    """A plain float32 product in place of the exact one."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, dimension_numbers).astype(dtype)


def _dot_exact(dtype, a, b, dimension_numbers):
    """The exact product, whatever the dtype of the sums around it."""
    with jax.enable_x64(True):
        a, b = a.astype(jnp.float64), b.astype(jnp.float64)
        return lax.dot_general(a, b, dimension_numbers).astype(dtype)


def _quantize_both_per_tensor(x, implementation=None):
    """`quantize_both`, which training calls, with one scale for all blocks."""
    del implementation

    def one_scale(x):
        whole = quantize(x, x.shape)
        counts = (x.shape[0], math.ceil(x.shape[1] / BLOCK))
        return ScaledArray(
            whole.codes, jnp.broadcast_to(whole.scales, counts), (1, BLOCK)
        )

    return one_scale(x), one_scale(x.T)


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_float32_dots_are_noticed(params, name, monkeypatch, fresh_programs):
    monkeypatch.setattr(numerics, "dot", _dot_float32)
    assert share_that_differs(differences_of_one_response(params, name)) > 0.01


@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
def test_sums_left_to_the_compiler_are_noticed(
    params, name, monkeypatch, fresh_programs
):
    """All sums but the exact dots': norms, softmax, residuals, log-sum-exp."""
    monkeypatch.setattr(numerics, "CPU_ACCUMULATION_DTYPE", "float32")
    monkeypatch.setattr(numerics, "dot", _dot_exact)
    assert share_that_differs(differences_of_one_response(params, name)) > 0.01


def test_per_tensor_scales_in_the_trainer_are_noticed(
    params, six_of_300, monkeypatch, fresh_programs
):
    sequences = six_of_300("fp8")
    for module in ("dot_general", "fused"):
        name = f"fp8rl_jax.fp8.{module}.quantize_both"
        monkeypatch.setattr(name, _quantize_both_per_tensor)
    rows = [[sequences[0].cut(100)], [sequences[1].cut(100)]]
    found, _ = differences(params, "fp8", rows, width=112, remat="full")
    assert share_that_differs(found) > 0.5
