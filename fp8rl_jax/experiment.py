"""From a configuration to the parts of a run, checked before anything is compiled."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, PyTree
from ml_collections import ConfigDict

from fp8rl_jax.data.batching import BLOCK, TokenBatch
from fp8rl_jax.data.layout import Layout, lay_out_rows, pack
from fp8rl_jax.data.prompts import PromptSet, tokenize_prompts
from fp8rl_jax.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from fp8rl_jax.fp8 import Recipe, get_recipe
from fp8rl_jax.grpo import Algorithm, policy_loss, preset
from fp8rl_jax.learner import (
    Learner,
    negative_log_likelihood,
)
from fp8rl_jax.models.qwen3.checkpoint import load_hf, resolve_model
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.mesh import check_divides, make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import num_shards
from fp8rl_jax.rollout import (
    ContinuousRolloutEngine,
    EngineLimits,
    RolloutEngine,
    SamplingParams,
)
from fp8rl_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask, Level
from fp8rl_jax.tasks.base import Example, Task
from fp8rl_jax.tasks.gsm8k import GSM8KConfig, GSM8KTask

_COUNTS = (
    "grpo.num_steps",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "grpo.num_epochs",
    "grpo.num_mini_batches",
    "train.micro_batch_size",
    "train.max_skipped_updates",
    "validation.max_prompts",
    "validation.batch_size",
    "validation.num_samples",
)
_WARM_START_COUNTS = (
    "warm_start.max_steps",
    "warm_start.batch_size",
    "warm_start.eval_period",
)


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """What it takes to run a model, before there is a task.

    Attributes:
      model: shape of the model.
      recipe: what runs in FP8.
      mesh: the devices.
      tokenizer: text to ids.
    """

    model: Qwen3Config
    recipe: Recipe
    mesh: Mesh
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """What it takes to train a model, before there is a tokenizer or a task.

    Attributes:
      model: shape of the model.
      recipe: what runs in FP8.
      algorithm: advantages and loss.
      learner: over the model's whole vocabulary.
    """

    model: Qwen3Config
    recipe: Recipe
    algorithm: Algorithm
    learner: Learner


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The immutable parts of a run.

    Attributes:
      config: the configuration it was built from.
      model: shape of the model.
      recipe: what runs in FP8.
      algorithm: advantages and loss.
      mesh: the devices.
      tokenizer: text to ids.
      task: problems and their grader.
      train_prompts: rendered training prompts.
      validation_prompts: rendered held-out prompts.
      engine: the sampler.
      sampling: how training completions are drawn.
      learner: the GRPO learner.
    """

    config: ConfigDict
    model: Qwen3Config
    recipe: Recipe
    algorithm: Algorithm
    mesh: Mesh
    tokenizer: Tokenizer
    task: Task
    train_prompts: PromptSet[Example]
    validation_prompts: PromptSet[Example]
    engine: RolloutEngine
    sampling: SamplingParams
    learner: Learner

    def initial_params(self) -> PyTree[Array]:
        """Float32 masters: the checkpoint's, or random; directly in shards."""
        shardings = self.learner.state_shardings().params
        return initial_params(self.config, self.model, shardings)

    def layout(self, batch: TokenBatch, mask: Bool[np.ndarray, "R T"]) -> Layout:
        """Micro-batches of sequences [R, T]; ``mask`` marks the targets that count."""
        c = self.config.train
        if not c.tokens_per_micro_batch:
            return lay_out_rows(batch, mask, min(len(mask), c.micro_batch_size))
        rows = num_shards(self.mesh, DEFAULT_RULES, "batch")
        return pack(batch, mask, c.tokens_per_micro_batch, rows)

    def warm_start_learner(self) -> Learner:
        """The learner of the supervised phase."""
        c = self.config.warm_start
        optimizer = dict(self.config.optimizer)
        optimizer |= {
            "learning_rate": c.learning_rate,
            "warmup_steps": c.warmup_steps,
            "decay_steps": 0,
        }
        return _learner(
            self.config,
            self.model,
            self.recipe,
            self.mesh,
            self.tokenizer,
            OptimizerConfig(**optimizer),
            negative_log_likelihood,
        )


def initial_params(
    config: ConfigDict,
    model: Qwen3Config,
    shardings: PyTree[jax.sharding.Sharding],
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> PyTree[Array]:
    """Parameters of the folder ``model.path``, or random ones; directly in shards."""
    if config.model.path:
        folder = resolve_model(config.model.path)
        return load_hf(folder, model, shardings, dtype)
    key = jax.random.key(config.seed)
    return init_params(model, key, shardings, dtype, std=config.model.init_std)


def engine_limits(config: ConfigDict, max_length: int | None = None) -> EngineLimits:
    """What the sampler may use; ``max_length`` as in `EngineLimits`."""
    c = config.sampling
    return EngineLimits(
        max_slots=c.max_slots,
        max_length=max_length,
        decode_steps=c.decode_steps,
        prefill_tokens=c.prefill_tokens,
        memory_fraction=c.memory_fraction,
    )


def build_model(config: ConfigDict) -> ModelSetup:
    """Builds and checks what needs neither parameters nor data.

    Raises:
      ValueError: as of `build`.
    """
    recipe = get_recipe(config.recipe)
    mesh = make_mesh(**config.mesh)
    model = _model_config(config)
    tokenizer = _tokenizer(config)
    check_tokenizer(tokenizer, model.vocab_size)
    _check_model_divides(model, mesh)
    return ModelSetup(model, recipe, mesh, tokenizer)


def build_training(config: ConfigDict, mesh: Mesh | AbstractMesh) -> TrainingSetup:
    """Builds and checks what sizes depend on, for devices that need not be there.

    Raises:
      ValueError: as of `build`.
    """
    algorithm = _algorithm(config)
    model, recipe = _model_config(config), get_recipe(config.recipe)
    _check_model_divides(model, mesh)
    _check_ranges(config)
    _check_batch(config)
    _check_lengths(config, model)
    _check_batches_divide(config, mesh)
    learner = Learner(
        model,
        recipe,
        OptimizerConfig(**config.optimizer),
        functools.partial(policy_loss, config=algorithm.loss),
        vocab_size=model.vocab_size,
        remat=config.train.remat,
        keep_codes=config.train.keep_codes,
        mesh=mesh,
    )
    return TrainingSetup(model, recipe, algorithm, learner)


def build(config: ConfigDict) -> Experiment:
    """Builds and checks everything that needs no parameters.

    Raises:
      ValueError: an option, file, tokenizer or mesh that cannot work, naming it and
        the remedy. Nothing has been compiled by then.
    """
    algorithm = _algorithm(config)
    setup = build_model(config)
    model, recipe, mesh, tokenizer = (
        setup.model,
        setup.recipe,
        setup.mesh,
        setup.tokenizer,
    )
    _check_ranges(config)
    _check_batch(config)
    _check_lengths(config, model)
    _check_batches_divide(config, mesh)
    _check_updates(config, algorithm)
    task = _task(config)
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        num_samples=config.grpo.num_generations_per_prompt,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        min_p=config.sampling.min_p,
    )
    render = functools.partial(
        tokenize_prompts,
        render=lambda example: task.render(example, tokenizer),
        max_length=config.task.max_prompt_length,
        too_long="drop",
    )
    if sampling.truncated:
        raise ValueError(
            "sampling.top_k, top_p and min_p cut the distribution that is sampled, and "
            "no loss here corrects for what was cut: leave them at 0, 1 and 0 in "
            "training. Validation and fp8rl_jax.generate take them."
        )
    loss_fn = functools.partial(policy_loss, config=algorithm.loss)
    optimizer = OptimizerConfig(**config.optimizer)
    return Experiment(
        config=config,
        model=model,
        recipe=recipe,
        algorithm=algorithm,
        mesh=mesh,
        tokenizer=tokenizer,
        task=task,
        train_prompts=render(task.train_source),
        validation_prompts=render(task.validation_source),
        engine=_engine(config, model, recipe, mesh, tokenizer),
        sampling=sampling,
        learner=_learner(config, model, recipe, mesh, tokenizer, optimizer, loss_fn),
    )


def _engine(config, model, recipe, mesh, tokenizer) -> ContinuousRolloutEngine:
    longest = config.task.max_prompt_length + config.sampling.max_new_tokens
    return ContinuousRolloutEngine(
        model,
        recipe.rollout,
        tokenizer.vocab_size,
        mesh,
        limits=engine_limits(config, longest),
        decode=tokenizer.decode,
    )


def _learner(config, model, recipe, mesh, tokenizer, optimizer, loss_fn) -> Learner:
    return Learner(
        model,
        recipe,
        optimizer,
        loss_fn,
        vocab_size=tokenizer.vocab_size,
        temperature=config.sampling.temperature,
        remat=config.train.remat,
        keep_codes=config.train.keep_codes,
        mesh=mesh,
    )


def _algorithm(config: ConfigDict) -> Algorithm:
    c = config.loss
    algorithm = preset(c.algorithm, max_response_length=config.sampling.max_new_tokens)

    def override(target, names):
        changes = {name: c[name] for name in names if c[name] is not None}
        return dataclasses.replace(target, **changes)

    advantages = override(algorithm.advantages, ["baseline", "normalize_std"])
    names = [f.name for f in dataclasses.fields(algorithm.loss) if f.name in c]
    return Algorithm(advantages, override(algorithm.loss, names))


def _model_config(config: ConfigDict) -> Qwen3Config:
    if config.model.path:
        return Qwen3Config.from_hf_folder(resolve_model(config.model.path))
    if config.model.size == "custom":
        return Qwen3Config(**config.model.custom)
    if config.model.size not in QWEN3_SIZES:
        raise ValueError(
            f"model.size={config.model.size!r}: choose one of "
            f"{', '.join(QWEN3_SIZES)}, custom; or give model.path."
        )
    return QWEN3_SIZES[config.model.size]


def _tokenizer(config: ConfigDict) -> Tokenizer:
    path = config.tokenizer.path or config.model.path
    if not path:
        raise ValueError(
            "tokenizer.path is empty and there is no model.path to take it from: give "
            "an HF tokenizer folder, or 'byte'."
        )
    if path == "byte":
        return load_tokenizer("byte")
    if not config.tokenizer.path:
        path = resolve_model(path)
    kwargs = {"enable_thinking": config.tokenizer.enable_thinking}
    return load_tokenizer(path, kwargs)


def _task(config: ConfigDict) -> Task:
    c = config.task
    if c.name == "arithmetic":
        level = Level(c.operators, c.max_operand, c.num_operands)
        return ArithmeticTask(
            ArithmeticConfig((level,), c.num_validation, c.hold_out_commuted)
        )
    if c.name == "gsm8k":
        for name in ("train_path", "validation_path"):
            if not c[name]:
                raise ValueError(
                    f"task.{name} is empty: give a JSONL file, "
                    f"--config.task.{name}=FILE."
                )
        return GSM8KTask(GSM8KConfig(c.train_path, c.validation_path, c.prompt_format))
    raise ValueError(f"task.name={c.name!r}: choose gsm8k or arithmetic.")


def _check_ranges(config: ConfigDict) -> None:
    names = (*_COUNTS, *(_WARM_START_COUNTS if config.warm_start.enabled else ()))
    for name in names:
        value = operator.attrgetter(name)(config)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if config.validation.temperature < 0:
        raise ValueError(
            f"validation.temperature={config.validation.temperature} must be 0 "
            "(greedy) or positive."
        )


def _check_batch(config: ConfigDict) -> None:
    g = config.grpo
    rows = g.num_prompts_per_step * g.num_generations_per_prompt
    if config.train.tokens_per_micro_batch:
        _check_packing(config, rows)
        return
    if rows % (g.num_mini_batches * config.train.micro_batch_size):
        raise ValueError(
            f"{g.num_prompts_per_step} prompts x {g.num_generations_per_prompt} "
            f"samples = {rows} rows do not divide into {g.num_mini_batches} "
            f"mini-batches of micro-batches of {config.train.micro_batch_size}: change "
            "grpo.num_prompts_per_step, grpo.num_mini_batches or "
            "train.micro_batch_size."
        )
    if config.warm_start.enabled:
        rows = config.warm_start.batch_size
        micro = config.train.micro_batch_size
        if rows > micro and rows % micro:
            raise ValueError(
                f"warm_start.batch_size={rows} does not divide into micro-batches of "
                f"train.micro_batch_size={micro}: change either."
            )


def _check_packing(config: ConfigDict, rows: int) -> None:
    tokens = config.train.tokens_per_micro_batch
    longest = config.task.max_prompt_length + config.sampling.max_new_tokens
    if tokens % BLOCK or tokens < longest:
        raise ValueError(
            f"train.tokens_per_micro_batch={tokens} must be a multiple of {BLOCK} and "
            f"hold one sequence of task.max_prompt_length + sampling.max_new_tokens = "
            f"{longest} tokens; or be 0: rows of train.micro_batch_size."
        )
    if rows % config.grpo.num_mini_batches:
        raise ValueError(
            f"{rows} rows do not divide into grpo.num_mini_batches="
            f"{config.grpo.num_mini_batches}."
        )


def _check_lengths(config: ConfigDict, model: Qwen3Config) -> None:
    prompt, new = config.task.max_prompt_length, config.sampling.max_new_tokens
    if prompt + new > model.max_position_embeddings:
        raise ValueError(
            f"task.max_prompt_length={prompt} and sampling.max_new_tokens={new} exceed "
            f"the model's {model.max_position_embeddings} positions: lower either."
        )


def _check_model_divides(model: Qwen3Config, mesh: Mesh) -> None:
    check_divides(
        mesh,
        DEFAULT_RULES,
        {
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "mlp": model.intermediate_size,
            "embed": model.hidden_size,
            "vocab": model.vocab_size,
        },
    )


def _check_batches_divide(config: ConfigDict, mesh: Mesh) -> None:
    if not config.train.tokens_per_micro_batch:
        check_divides(mesh, DEFAULT_RULES, {"batch": config.train.micro_batch_size})
    check_divides(mesh, DEFAULT_RULES, {"batch": config.grpo.num_prompts_per_step})
    if config.warm_start.enabled:
        check_divides(mesh, DEFAULT_RULES, {"batch": config.warm_start.batch_size})


def _check_updates(config: ConfigDict, algorithm: Algorithm) -> None:
    updates = config.grpo.num_epochs * config.grpo.num_mini_batches
    if updates > 1 and algorithm.loss.old_policy == "current":
        raise ValueError(
            f"loss.old_policy='current' fixes the ratio at 1, but each rollout serves "
            f"{updates} updates: set it to 'rollout' or 'recomputed'."
        )
