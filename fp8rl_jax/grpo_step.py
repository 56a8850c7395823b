"""One step of GRPO: prompts -> rollouts -> rewards -> advantages -> updates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree

from fp8rl_jax.console import Sample
from fp8rl_jax.data.batching import TokenBatch, place_on_targets, token_rows
from fp8rl_jax.data.prompts import PromptBatch, PromptIterator
from fp8rl_jax.experiment import Experiment
from fp8rl_jax.grpo import LossInputs, group_advantages, kl_penalized_rewards
from fp8rl_jax.learner import TrainState
from fp8rl_jax.non_finite import SkippedUpdates
from fp8rl_jax.parallel.processes import fetch
from fp8rl_jax.rollout import Prompts, Rollouts
from fp8rl_jax.step_metrics import combine_updates, step_metrics, with_throughput
from fp8rl_jax.tasks.base import Example, Grade
from fp8rl_jax.tasks.pool import GradingPool
from fp8rl_jax.timing import Timer, memory_metrics, phase_memory
from fp8rl_jax.validation import grade_rollouts


class StepResult(NamedTuple):
    """What a step leaves.

    Attributes:
      state: after the updates.
      codes: FP8 codes of its masters.
      metrics: by name.
      samples: a completion of each of the first prompts, to show; none of a step whose
        log-probs were not finite.
    """

    state: TrainState
    codes: PyTree
    metrics: dict[str, float]
    samples: list[Sample]


class _Rows(NamedTuple):
    """The sequences of a step, a row each.

    Attributes:
      prompts: token ids.
      tokens: the batch [R, T].
      mask: targets that the policy sampled.
      rollout_log_probs: the sampler's, at those targets.
    """

    prompts: Sequence[Sequence[int]]
    tokens: TokenBatch
    mask: Bool[np.ndarray, "R T"]
    rollout_log_probs: Float[np.ndarray, "R T"]


class _Graded(NamedTuple):
    """Verdicts on the completions, and the rewards that are trained on."""

    grades: list[Grade]
    texts: list[str]
    rewards: Float[np.ndarray, "P G"]


class GRPOStep:
    """Takes one step after the other.

    Args:
      experiment: the parts of the run.
      prompts: where they come from.
      pool: the grader.
      timer: receives the time of every phase.
      skipped: is told of updates that were not finite.
    """

    def __init__(
        self,
        experiment: Experiment,
        prompts: PromptIterator[Example],
        pool: GradingPool,
        timer: Timer,
        skipped: SkippedUpdates,
    ):
        self._experiment = experiment
        self._config = experiment.config
        self._learner = experiment.learner
        self._prompts = prompts
        self._pool = pool
        self._timer = timer
        self._skipped = skipped
        self._group_advantages = jax.jit(
            lambda rewards: group_advantages(rewards, experiment.algorithm.advantages)
        )

    def __call__(
        self, state: TrainState, codes: PyTree, reference: PyTree | None, step: int
    ) -> StepResult:
        """Takes the step after ``step``.

        Args:
          state: is gone afterwards, and so are its codes.
          codes: of the masters.
          reference: frozen weights of the reference policy, if the loss has one.
          step: how many came before.
        """
        with self._timer.phase("total_step_time"):
            result = self._run(state, codes, reference, step)
        metrics = result.metrics | memory_metrics()
        metrics["train/skipped_updates"] = self._skipped.total
        metrics |= with_throughput(self._timer.collect(), metrics, jax.device_count())
        return result._replace(metrics=metrics)

    def _run(self, state, codes, reference, step) -> StepResult:
        group = self._config.grpo.num_generations_per_prompt
        batch = next(self._prompts)
        rollouts, sampled = self._generate(state, codes, batch, step)
        with self._timer.phase("data_processing"):
            rows = _rows(batch, rollouts, group)
        if not np.isfinite(rollouts.log_probs).all():
            g = self._config.grpo
            count, cause = g.num_epochs * g.num_mini_batches, "sampled log-probs"
            arrays = dict(mask=rows.mask, rollout_log_probs=rows.rollout_log_probs)
            self._note_skipped(step, count, cause, rows, arrays, sampled)
            return StepResult(state, codes, sampled | {"train/finite": 0.0}, [])
        graded = self._grade(batch, rollouts, step)
        old, of_reference = self._score_rows(state, codes, reference, rows)
        sampled |= phase_memory("policy_and_reference_logprobs")
        with self._timer.phase("advantage_calculation"):
            inputs = self._loss_inputs(rows, graded.rewards, old, of_reference)
        with self._timer.phase("policy_training"):
            state, codes, updates = self._update(
                state, codes, rows.tokens, inputs, step
            )
            sampled |= phase_memory("policy_training")
        advantages = inputs.advantages.reshape(-1, group)
        metrics = step_metrics(
            batch, rollouts, graded.grades, graded.rewards, advantages
        )
        metrics |= combine_updates(updates) | sampled
        self._note_updates(step, updates, metrics, rows, graded, inputs)
        decode = self._experiment.tokenizer.decode
        shown = [
            Sample(
                decode(rows.prompts[i]), graded.texts[i], float(graded.rewards.flat[i])
            )
            for i in range(0, len(rows.prompts), group)
        ]
        return StepResult(
            state, codes, metrics, shown[: self._config.logging.num_samples]
        )

    def _generate(
        self, state, codes, batch: PromptBatch, step: int
    ) -> tuple[Rollouts, dict[str, float]]:
        e, c = self._experiment, self._config
        with self._timer.phase("generation"):
            weights = self._learner.rollout_weights(state.params, codes)
            rollouts = e.engine.generate(
                weights,
                _prompts_of(batch, c.grpo.num_generations_per_prompt),
                e.sampling,
                (c.seed, step),
            )
            return rollouts, e.engine.metrics | phase_memory("generation")

    def _grade(self, batch: PromptBatch, rollouts: Rollouts, step: int) -> _Graded:
        e, g = self._experiment, self._config.grpo
        group = g.num_generations_per_prompt
        with self._timer.phase("reward_calculation"):
            examples = [x for x in batch.examples for _ in range(group)]
            grades, texts = grade_rollouts(rollouts, examples, e.tokenizer, self._pool)
            rewards = np.array([x.reward for x in grades], np.float32)
            if g.shuffle_rewards:
                rng = np.random.default_rng((self._config.seed, step))
                rewards = rng.permutation(rewards)
            return _Graded(grades, texts, rewards.reshape(-1, group))

    def _score_rows(
        self, state, codes, reference, rows: _Rows
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Old log-probs, if they are recomputed, and the reference's, if there is one.

        Both [R, T].
        """
        old = of_reference = None
        with self._timer.phase("policy_and_reference_logprobs"):
            if self._experiment.algorithm.loss.old_policy == "recomputed":
                frozen = self._learner.frozen_weights(state.params, codes)
                old = self._score(frozen, rows)
                del frozen
            if reference is not None:
                of_reference = self._score(reference, rows)
        return old, of_reference

    def _score(self, weights: PyTree, rows: _Rows) -> Float[np.ndarray, "R T"]:
        layout = self._experiment.layout(rows.tokens, rows.mask)
        batch, count = self._learner.put(layout.batch), layout.num_micro_batches
        scored = self._learner.score(weights, batch, np.int32(count))
        return layout.restore(fetch(scored, self._experiment.mesh))

    def _loss_inputs(self, rows: _Rows, rewards, old, of_reference) -> LossInputs:
        loss = self._experiment.algorithm.loss
        rewards = jnp.asarray(rewards)
        if of_reference is not None and loss.kl_placement == "reward":
            rewards = kl_penalized_rewards(
                rewards,
                jnp.asarray(rows.rollout_log_probs if old is None else old),
                jnp.asarray(of_reference),
                jnp.asarray(rows.mask),
                loss.kl_coefficient,
            )
            of_reference = None
        advantages = np.asarray(self._group_advantages(rewards)).reshape(-1)
        return LossInputs(
            rows.mask, advantages, old, rows.rollout_log_probs, of_reference
        )

    def _update(
        self, state, codes, tokens: TokenBatch, inputs: LossInputs, step: int
    ) -> tuple[TrainState, PyTree, list[dict[str, Any]]]:
        """Every optimiser step that one rollout batch serves."""
        c, learner = self._config, self._learner
        num_rows = len(inputs.mask)
        results = []
        for epoch in range(c.grpo.num_epochs):
            order = np.arange(num_rows)
            if c.grpo.num_mini_batches > 1:
                rng = np.random.default_rng((c.seed, step, epoch))
                order = rng.permutation(num_rows)
            for rows in np.split(order, c.grpo.num_mini_batches):
                some, its = jax.tree.map(lambda x, r=rows: x[r], (tokens, inputs))
                layout = self._experiment.layout(some, its.mask)
                arrays = learner.put((layout.batch, layout.take(its)))
                count = np.int32(layout.num_micro_batches)
                result = learner.update(state, codes, *arrays, count)
                state, codes = result.state, result.codes
                padding = np.float32(1.0 - layout.token_share)
                results.append(result.metrics | {"padding_rate": padding})
        return state, codes, jax.device_get(results)

    def _note_updates(
        self, step, updates, metrics, rows: _Rows, graded: _Graded, inputs: LossInputs
    ) -> None:
        count = sum(not u["finite"] for u in updates)
        if not count:
            self._skipped.applied()
            return
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        self._note_skipped(
            step,
            count,
            f"loss {loss}, gradient norm {norm}",
            rows,
            inputs._asdict() | {"rewards": graded.rewards.reshape(-1)},
            [{name: float(x) for name, x in u.items()} for u in updates],
        )

    def _note_skipped(
        self,
        step: int,
        count: int,
        cause: str,
        rows: _Rows,
        arrays: dict[str, Any],
        metrics: Any,
    ) -> None:
        texts = [self._experiment.tokenizer.decode(p) for p in rows.prompts]
        batch = rows.tokens._asdict() | arrays | {"prompts": texts}
        self._skipped.skipped(step + 1, count, cause, batch, metrics)


def _prompts_of(batch: PromptBatch, group: int) -> Prompts:
    count = len(batch.tokens)
    ids = np.arange(count * group, dtype=np.int32).reshape(count, group)
    return Prompts([list(tokens) for tokens in batch.tokens], ids)


def _rows(batch: PromptBatch, rollouts: Rollouts, group: int) -> _Rows:
    prompts = [p for p in batch.tokens for _ in range(group)]
    tokens, mask = token_rows(prompts, rollouts.completions())
    return _Rows(prompts, tokens, mask, place_on_targets(rollouts.log_probs, mask))
