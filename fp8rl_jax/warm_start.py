"""A short supervised phase that puts a skill within reach of reinforcement."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fp8rl_jax.console import Reporter
from fp8rl_jax.data.batching import token_rows
from fp8rl_jax.data.prompts import PromptIterator
from fp8rl_jax.experiment import Experiment
from fp8rl_jax.learner import SupervisedInputs
from fp8rl_jax.metrics import MetricWriter
from fp8rl_jax.tasks.base import SupervisedTask


class WarmStartError(ValueError):
    """The supervised phase did not end where GRPO has something to learn."""


def warm_start(
    experiment: Experiment,
    params: PyTree[Array],
    evaluate: Callable[[PyTree], float],
    writer: MetricWriter,
    reporter: Reporter,
    should_stop: Callable[[], bool],
) -> tuple[PyTree[Array], float] | None:
    """Imitates the task's answers until held-out accuracy reaches the target.

    Args:
      experiment: the run's parts.
      params: float32 masters to start from (donated).
      evaluate: sampler weights -> held-out accuracy.
      writer: receives the phase's metrics.
      reporter: shows progress.
      should_stop: asked after every step.

    Returns:
      The masters and their held-out accuracy, those of the last evaluation below
      ``max_accuracy`` if one jumped beyond it; None if told to stop.

    Raises:
      WarmStartError: the target was not reached, or the accuracy went from below
        ``min_accuracy`` to beyond ``max_accuracy``.
    """
    config, task = experiment.config.warm_start, experiment.task
    if not isinstance(task, SupervisedTask):
        raise WarmStartError(f"Task {task.name!r} has no answers to imitate.")
    learner, tokenizer = experiment.warm_start_learner(), experiment.tokenizer
    prompts = PromptIterator(
        experiment.train_prompts, config.batch_size, experiment.config.seed
    )
    state = learner.init(params)
    codes = learner.quantize(state.params)
    kept = None  # where to go back to if a step overshoots
    for step in range(1, config.max_steps + 1):
        batch = next(prompts)
        answers = [
            [*tokenizer.encode(task.target(example)), tokenizer.stop_ids[0]]
            for example in batch.examples
        ]
        tokens, mask = token_rows(batch.tokens, answers)
        layout = experiment.layout(tokens, mask)
        inputs = layout.take(SupervisedInputs(mask))
        state, codes, metrics, _ = learner.update(
            state,
            codes,
            *learner.put((layout.batch, inputs)),
            np.int32(layout.num_micro_batches),
        )
        metrics = {
            f"train/{name}": np.asarray(value).item() for name, value in metrics.items()
        }
        if not metrics["train/finite"]:
            raise FloatingPointError(f"Warm start: non-finite loss at step {step}.")
        done = step % config.eval_period == 0
        if done:
            accuracy = evaluate(learner.rollout_weights(state.params, codes))
            metrics["validation/accuracy"] = accuracy
        writer.write(step, metrics)
        reporter.step(step, metrics)
        if done and accuracy > config.max_accuracy:
            if kept is None:
                raise WarmStartError(
                    f"The warm start jumped to {accuracy:.1%}, beyond "
                    f"warm_start.max_accuracy={config.max_accuracy:.0%}: lower "
                    "warm_start.learning_rate or warm_start.eval_period."
                )
            return kept
        if done and accuracy >= config.stop_accuracy:
            return state.params, accuracy
        if done and accuracy >= config.min_accuracy:
            kept = jax.tree.map(jnp.copy, state.params), accuracy
        if should_stop():
            return None
    raise WarmStartError(
        f"The warm start did not reach {config.stop_accuracy:.0%} in "
        f"{config.max_steps} steps: raise warm_start.max_steps."
    )
