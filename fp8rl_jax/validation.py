"""Accuracy on held-out problems."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import PyTree

from fp8rl_jax.console import Sample
from fp8rl_jax.data.prompts import PromptSet
from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.parallel.processes import exchange, own_share
from fp8rl_jax.rollout import FinishReason, Prompts, RolloutEngine, SamplingParams
from fp8rl_jax.rollout.types import Rollouts
from fp8rl_jax.tasks.base import Example, Grade
from fp8rl_jax.tasks.pool import GradingPool


def grade_rollouts(
    rollouts: Rollouts,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    pool: GradingPool,
) -> tuple[list[Grade], list[str]]:
    """Grades every completion; ``examples`` has one entry per row.

    Each process grades a share and passes its verdicts on: a grader that times out on
    one of them counts as such on all.

    Returns:
      The grades and the decoded completions.
    """
    ids = [completion.tolist() for completion in rollouts.completions()]
    texts = [tokenizer.decode(row) for row in ids]
    samples = list(zip(examples, texts, ids, strict=True))
    shares = exchange(pool.grade(own_share(samples)))
    return [grade for share in shares for grade in share], texts


def validate(
    engine: RolloutEngine,
    weights: PyTree,
    prompts: PromptSet[Example],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    pool: GradingPool,
    *,
    key: tuple[int, int],
    max_prompts: int,
    batch_size: int,
) -> tuple[dict[str, float], list[Sample]]:
    """Samples and grades held-out prompts, each counted once.

    Args:
      engine: the sampler.
      weights: the policy as the sampler reads it.
      prompts: held-out prompts; the first ``max_prompts`` are used.
      sampling: how completions are drawn.
      tokenizer: ids to text.
      pool: the grader.
      key: (seed, step) of the sampling noise.
      max_prompts: prompts to use at most.
      batch_size: prompts sampled together; a short last batch is filled up and the
        filling dropped, so that one program serves all.

    Returns:
      ``accuracy`` (mean of the raw verdicts), ``reward``, ``avg_length``,
      ``truncation_rate`` and, with several samples a prompt, ``pass_k``; and one
      sample a prompt to show.
    """
    count = min(len(prompts), max_prompts)
    num_samples = sampling.num_samples
    grades: list[Grade] = []
    shown: list[Sample] = []
    lengths, truncated = [], []
    for start in range(0, count, batch_size):
        rows = list(range(start, min(start + batch_size, count)))
        filled = rows + [rows[0]] * (batch_size - len(rows))
        tokens = [list(prompts.tokens[i]) for i in filled]
        sample_ids = np.arange(batch_size * num_samples) + start * num_samples
        rollouts = engine.generate(
            weights,
            Prompts(tokens, sample_ids.reshape(batch_size, num_samples)),
            sampling,
            key,
        )
        examples = [prompts.examples[i] for i in filled for _ in range(num_samples)]
        batch, texts = grade_rollouts(rollouts, examples, tokenizer, pool)
        keep = len(rows) * num_samples
        grades += batch[:keep]
        lengths.append(rollouts.lengths[:keep])
        truncated.append(rollouts.finish_reasons[:keep] == FinishReason.LENGTH)
        for row in range(0, keep, num_samples):
            prompt = tokenizer.decode(tokens[row // num_samples])
            shown.append(Sample(prompt, texts[row], batch[row].reward))
    correct = np.array([g.correct for g in grades], float).reshape(count, num_samples)
    metrics = {
        "accuracy": correct.mean(),
        "reward": np.mean([g.reward for g in grades]),
        "avg_length": np.concatenate(lengths).mean(),
        "truncation_rate": np.concatenate(truncated).mean(),
    }
    if num_samples > 1:
        metrics["pass_k"] = correct.max(axis=1).mean()
    return {name: float(value) for name, value in metrics.items()}, shown
