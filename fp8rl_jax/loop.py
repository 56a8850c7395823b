"""The GRPO loop: start or resume, step, validate, save, report."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from fp8rl_jax.checkpoint import Checkpointer, CheckpointError, all_finite
from fp8rl_jax.console import Reporter, print_table, say
from fp8rl_jax.data.prompts import PromptIterator
from fp8rl_jax.experiment import Experiment, build
from fp8rl_jax.grpo_step import GRPOStep
from fp8rl_jax.learner import TrainState
from fp8rl_jax.learning_curve import plot_learning_curve
from fp8rl_jax.metrics import open_metrics
from fp8rl_jax.non_finite import SkippedUpdates
from fp8rl_jax.parallel.processes import check_same
from fp8rl_jax.parallel.start import is_primary
from fp8rl_jax.preemption import PreemptionGuard
from fp8rl_jax.resume import check_config_compatible
from fp8rl_jax.rollout import SamplingParams
from fp8rl_jax.sizing import check_memory
from fp8rl_jax.tasks.pool import GradingPool
from fp8rl_jax.timing import Timer
from fp8rl_jax.validation import validate
from fp8rl_jax.warm_start import warm_start

_log = logging.getLogger(__name__)

# A resumed run must agree with its checkpoint on these. Files may have moved: the
# prompts themselves are compared.
_FIXED = (
    "seed",
    "recipe",
    "model.size",
    "model.custom",
    "task.name",
    "loss",
    "optimizer",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
)
# Offsets of the sampling seed: validation never reuses training noise.
_VALIDATION_SEED = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
      step: GRPO steps completed.
      finished: False if the run was told to stop early.
      accuracy: held-out accuracy by stage, in order.
      run_dir: where everything is.
    """

    step: int
    finished: bool
    accuracy: dict[str, float]
    run_dir: Path


def train(config: ConfigDict) -> Result:
    """Runs, or resumes, a whole experiment.

    Raises:
      ValueError: the configuration, data, checkpoint, disk or mesh cannot work;
        nothing has been compiled by then.
      CheckpointError: the first or the last state could not be saved.
      FloatingPointError: ``train.max_skipped_updates`` steps in a row had a loss,
        gradient or sampled log-prob that is not finite; the state is saved.
    """
    if not config.run_dir:
        raise ValueError("run_dir is empty: give a folder, --config.run_dir=DIR.")
    experiment = build(config)
    check_memory(config, experiment.mesh)
    with (
        jax.set_mesh(experiment.mesh),
        PreemptionGuard() as guard,
        GradingPool(
            experiment.task, config.grading.num_workers, config.grading.timeout_s
        ) as pool,
        Checkpointer(
            Path(config.run_dir) / "checkpoints",
            keep=config.checkpoint.keep,
            best_metric="validation/accuracy" if config.validation.period else None,
        ) as checkpointer,
    ):
        return _Run(experiment, pool, checkpointer, guard).run()


class _Run:
    """The mutable side of an experiment."""

    def __init__(
        self,
        experiment: Experiment,
        pool: GradingPool,
        checkpointer: Checkpointer,
        guard: PreemptionGuard,
    ):
        self._experiment = experiment
        self._config = experiment.config
        self._learner = experiment.learner
        self._pool = pool
        self._checkpointer = checkpointer
        self._guard = guard
        self._run_dir = Path(self._config.run_dir)
        self._timer = Timer()
        self._skipped = SkippedUpdates(
            self._run_dir / "non_finite",
            self._config.train.max_skipped_updates,
            writes=is_primary(),
        )
        self._prompts = PromptIterator(
            experiment.train_prompts,
            self._config.grpo.num_prompts_per_step,
            self._config.seed,
        )
        self._sinks = ["jsonl"]
        if self._config.logging.tensorboard:
            self._sinks.append("tensorboard")
        if not is_primary():
            self._sinks = []
        self._accuracy: dict[str, float] = {}
        self._needs_reference = experiment.algorithm.loss.kl_coefficient > 0
        self._step = GRPOStep(
            experiment, self._prompts, pool, self._timer, self._skipped
        )

    def run(self) -> Result:
        """Starts or resumes, trains to the last step, reports."""
        self._describe()
        resumed = self._checkpointer.latest_step()
        check_same(
            {"configuration": self._config.to_dict(), "latest checkpoint": resumed},
            "give all the same flags, and a run_dir on a file system that they share",
        )
        self._checkpointer.check_space(
            self._abstract_arrays(), self._saves_to_come(resumed)
        )
        if resumed is None:
            started = self._start()
            if started is None:
                say("Stopped during the warm start; it begins anew next time.")
                return Result(0, False, self._accuracy, self._run_dir)
            state, reference, step = *started, 0
        else:
            state, reference, step = *self._resume(), resumed
            say(f"Resuming after step {step} from {self._checkpointer.directory}.")
        codes = self._learner.quantize(state.params)
        total = self._config.grpo.num_steps
        with (
            open_metrics(
                self._run_dir, "grpo", self._sinks, None if resumed is None else step
            ) as writer,
            Reporter(total, "grpo") as reporter,
        ):
            if resumed is None:
                metrics = {}
                if self._validates(0, last=False):
                    stage = "before GRPO"
                    if self._config.warm_start.enabled:
                        stage = "after the warm start"
                    metrics = self._validate(state, codes, 0, stage)
                    writer.write(0, metrics)
                self._save(state, reference, 0, metrics)
            first = step
            while (
                step < total
                and not self._skipped.too_many()
                and not self._guard.should_stop()
            ):
                state, codes, metrics, samples = self._step(
                    state, codes, reference, step
                )
                step += 1
                if step == first + 1:
                    reporter.console.print(self._experiment.engine.description)
                if self._validates(step, last=step == total):
                    metrics |= self._validate(state, codes, step, "after GRPO")
                writer.write(step, metrics)
                reporter.step(step, metrics)
                if self._due(self._config.logging.samples_period, step):
                    reporter.samples(samples)
                if self._due(self._config.checkpoint.period, step) or step == total:
                    self._try(self._save, state, reference, step, metrics)
            self._try(self._checkpointer.wait)
            if self._checkpointer.latest_step() != step:
                self._save(state, reference, step, {})
        self._checkpointer.wait()
        if self._skipped.too_many():
            raise self._skipped.error(step)
        return self._finish(step)

    @staticmethod
    def _try(save, *arguments) -> None:
        """A failed save does not end the run: the next one may succeed."""
        try:
            save(*arguments)
        except CheckpointError as error:
            _log.warning("%s. The run goes on and tries again at the next save.", error)

    def _describe(self) -> None:
        e, c = self._experiment, self._config
        model = c.model.path or f"random weights, size {c.model.size}"
        say(
            f"Model: {model}, {e.model.num_parameters:,} parameters. "
            f"Recipe: {c.recipe}. "
            f"Mesh: {dict(e.mesh.shape)} of {jax.devices()[0].device_kind}.\n"
            f"Task: {e.task.name}, {len(e.train_prompts)} training prompts "
            f"({e.train_prompts.num_dropped} dropped as too long), "
            f"{len(e.validation_prompts)} held out."
        )
        if not e.recipe.one_policy and e.algorithm.loss.tis_ratio is None:
            say(
                f"Warning: recipe {c.recipe!r} samples and trains in different "
                "precision and loss.tis_ratio is off. For truncated importance "
                "sampling set it to 2.0 and loss.old_policy to 'recomputed'."
            )

    def _start(self) -> tuple[TrainState, PyTree | None] | None:
        """Initial state and reference policy, after the warm start if there is one."""
        params = self._experiment.initial_params()
        if self._config.warm_start.enabled:
            codes = self._learner.quantize(params)
            weights = self._learner.rollout_weights(params, codes)
            self._accuracy["at the start"] = self._accuracy_of(weights)
            with (
                open_metrics(self._run_dir, "warm_start", self._sinks) as writer,
                Reporter(
                    self._config.warm_start.max_steps,
                    "warm start",
                    {"loss": "train/loss", "accuracy": "validation/accuracy"},
                ) as reporter,
            ):
                metrics = {"validation/accuracy": self._accuracy["at the start"]}
                writer.write(0, metrics)
                done = warm_start(
                    self._experiment,
                    params,
                    self._accuracy_of,
                    writer,
                    reporter,
                    self._guard.should_stop,
                )
            if done is None:
                return None
            params, self._accuracy["after the warm start"] = done
        state = self._learner.init(params)
        reference = None
        if self._needs_reference:
            codes = self._learner.quantize(state.params)
            reference = self._learner.frozen_weights(state.params, codes)
        return state, reference

    def _saves_to_come(self, resumed: int | None) -> int:
        """The first, one each period and the last; SIGTERM may make one more."""
        period, total = self._config.checkpoint.period, self._config.grpo.num_steps
        start = resumed or 0
        if start >= total:
            return 0
        later = -(-total // period) - start // period if period else 1
        return later + (resumed is None)

    def _abstract_arrays(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what a checkpoint holds."""
        abstract: dict[str, Any] = {"train": self._learner.abstract_state()}
        if self._needs_reference:
            params = abstract["train"].params
            codes = jax.eval_shape(self._learner.quantize, params)
            shapes = jax.eval_shape(self._learner.frozen_weights, params, codes)
            replicated = jax.sharding.NamedSharding(
                self._experiment.mesh, jax.sharding.PartitionSpec()
            )
            abstract["reference"] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
                shapes,
            )
        return abstract

    def _resume(self) -> tuple[TrainState, PyTree | None]:
        restored, meta = self._checkpointer.restore(self._abstract_arrays())
        check_config_compatible(meta["config"], self._config.to_dict(), _FIXED)
        self._prompts.set_state(meta["prompts"])
        self._accuracy = dict(meta["accuracy"])
        self._skipped.total = meta.get("skipped_updates", 0)
        return restored["train"], restored.get("reference")

    def _save(self, state, reference, step: int, metrics: dict[str, float]) -> None:
        if not bool(all_finite(state.params)):
            raise FloatingPointError(
                f"The parameters are not finite after step {step}; nothing was saved "
                f"and the last checkpoint in {self._checkpointer.directory} stands."
            )
        arrays = {"train": state}
        if reference is not None:
            arrays["reference"] = reference
        meta = {
            "config": self._config.to_dict(),
            "prompts": self._prompts.get_state(),
            "accuracy": self._accuracy,
            "skipped_updates": self._skipped.total,
        }
        with self._timer.phase("checkpointing"):
            self._checkpointer.save(step, arrays, meta, metrics)

    def _validation_sampling(self, temperature: float, num_samples: int, **truncation):
        return dataclasses.replace(
            self._experiment.sampling,
            temperature=temperature,
            num_samples=num_samples,
            **truncation,
        )

    def _run_validation(self, weights: PyTree, sampling: SamplingParams, step: int):
        e, c = self._experiment, self._config
        return validate(
            e.engine,
            weights,
            e.validation_prompts,
            sampling,
            e.tokenizer,
            self._pool,
            key=(c.seed + _VALIDATION_SEED, step),
            max_prompts=c.validation.max_prompts,
            batch_size=c.validation.batch_size,
        )

    def _accuracy_of(self, weights: PyTree) -> float:
        """Greedy held-out accuracy, for the warm start."""
        sampling = self._validation_sampling(0.0, 1)
        return self._run_validation(weights, sampling, 0)[0]["accuracy"]

    def _validate(self, state, codes, step: int, stage: str) -> dict[str, float]:
        c = self._config.validation
        with self._timer.phase("validation"):
            weights = self._learner.rollout_weights(state.params, codes)
            sampling = self._validation_sampling(
                c.temperature,
                c.num_samples,
                top_k=c.top_k,
                top_p=c.top_p,
                min_p=c.min_p,
            )
            metrics, _ = self._run_validation(weights, sampling, step)
        self._accuracy[stage] = metrics["accuracy"]
        return {f"validation/{name}": value for name, value in metrics.items()}

    def _validates(self, step: int, last: bool) -> bool:
        c = self._config.validation
        if c.period == 0:
            return False
        wanted = c.at_start if step == 0 else step % c.period == 0
        return wanted or (last and c.at_end)

    @staticmethod
    def _due(period: int, step: int) -> bool:
        return period > 0 and step % period == 0

    def _finish(self, step: int) -> Result:
        finished = step >= self._config.grpo.num_steps
        if not finished:
            say(f"Stopped after step {step}; the same command resumes the run.")
        if is_primary():
            if self._accuracy:
                rows = [
                    {"held-out accuracy": stage, "": f"{accuracy:.1%}"}
                    for stage, accuracy in self._accuracy.items()
                ]
                print_table(rows)
            curve = plot_learning_curve(self._run_dir / "metrics.jsonl")
            print(f"Checkpoints:    {self._checkpointer.directory}")
            print(f"Metrics:        {self._run_dir / 'metrics.jsonl'}")
            print(f"Learning curve: {curve}")
        return Result(step, finished, self._accuracy, self._run_dir)
