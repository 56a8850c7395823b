"""One optimiser step: micro-batches, gradients, masters, and codes quantised once.

Used by GRPO and by supervised fine-tuning alike; they differ in the loss alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from fp8rl_jax.data.batching import TokenBatch
from fp8rl_jax.fp8 import Precision, Recipe
from fp8rl_jax.fp8.weights import (
    freeze_linear_kernels,
    quantize_weights,
    sampling_weights,
    training_weights,
)
from fp8rl_jax.grpo import Normalizer, combine_metrics, empty_metrics
from fp8rl_jax.logprobs import token_log_probs
from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.models.qwen3.model import REMAT_POLICIES, Qwen3, abstract_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import tree_shardings

# (log_probs, inputs, normalizer) -> (loss, metrics); inputs have a field ``mask``.
LossFn = Callable[[Array, Any, Normalizer], tuple[Array, dict[str, Array]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds of the learner.

    Attributes:
      step: int32 scalar, optimiser steps taken.
      params: float32 masters.
      opt_state: optimiser state.
    """

    step: Int[Array, ""]
    params: PyTree[Array]
    opt_state: PyTree


class UpdateResult(NamedTuple):
    """What an update leaves behind.

    Attributes:
      state: the new state; the old one, with nothing but its step changed, if the loss
        or the gradient was not finite.
      codes: FP8 codes of the new masters.
      metrics: scalars: the loss function's, ``grad_norm``, ``lr`` and ``finite``.
      log_probs: float32 [micro-batches, N, R], by the masters before the update.
    """

    state: TrainState
    codes: PyTree
    metrics: dict[str, Array]
    log_probs: Float[Array, "A N R"]


class Learner:
    """Updates a policy; holds no arrays.

    Args:
      config: the model.
      recipe: what runs in FP8.
      optimizer: the optimiser.
      loss_fn: (log_probs, loss inputs, normalizer) -> (loss, metrics); the sum of its
        losses over micro-batches is the loss of the batch.
      vocab_size: the tokenizer's ids; the model's further ids have no probability.
      temperature: of the policy: the sampling temperature.
      remat: rematerialisation policy of the layers.
      keep_codes: whether an update holds the FP8 codes of all layers. Otherwise every
        layer quantises its masters, the same codes, when it runs: 14 GB less at 8B.
      mesh: device mesh; None for one device.

    Attributes:
      keeps_codes: as given.
      update_program: what :meth:`update` runs, jitted; see :meth:`_update`.
      score: (weights, batch) -> log-probs, see :meth:`_score`.
      quantize: params -> FP8 codes of the linear kernels.
      rollout_weights: (params, codes) -> the policy as the sampler reads it.
      frozen_weights: (params, codes) -> the policy as `score` reads it.

    Raises:
      ValueError: an unknown remat policy, or a mesh that does not divide the model.
    """

    def __init__(
        self,
        config: Qwen3Config,
        recipe: Recipe,
        optimizer: OptimizerConfig,
        loss_fn: LossFn,
        *,
        vocab_size: int,
        temperature: float = 1.0,
        remat: str = "full",
        keep_codes: bool = True,
        mesh: Mesh | None = None,
    ):
        if remat not in REMAT_POLICIES:
            raise ValueError(
                f"Unknown remat policy {remat!r}: choose one of "
                f"{', '.join(REMAT_POLICIES)}."
            )
        if not temperature > 0:
            raise ValueError(
                f"The policy's temperature must be positive, got {temperature}: greedy "
                "samples have no policy gradient."
            )
        self._config = config
        self._recipe = recipe
        self._schedule = optimizer.schedule()
        self._tx = optimizer.transform()
        self._loss_fn = loss_fn
        self._log_probs = functools.partial(
            policy_log_probs,
            config,
            recipe.train,
            vocab_size=vocab_size,
            temperature=temperature,
        )
        self._remat = remat
        self._mesh = mesh
        shardings = self.state_shardings()
        self.keeps_codes = keep_codes
        self.update_program = jax.jit(
            self._update,
            donate_argnums=(0, 1),
            out_shardings=None
            if shardings is None
            else UpdateResult(shardings, None, None, None),
        )
        self.quantize = jax.jit(self._quantize)
        self.rollout_weights = jax.jit(self._weights_for(recipe.rollout))
        self.frozen_weights = jax.jit(self._weights_for(recipe.train))
        self.score = jax.jit(self._score)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, allocating nothing."""
        params = abstract_params(self._config)
        state = TrainState(
            jax.ShapeDtypeStruct((), jnp.int32),
            params,
            jax.eval_shape(self._tx.init, params),
        )
        shardings = self.state_shardings()
        if shardings is None:
            return state
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            shardings,
        )

    def state_shardings(self) -> TrainState | None:
        """Shardings of the state over the mesh; None without a mesh."""
        if self._mesh is None:
            return None
        params = abstract_params(self._config)
        axes = param_axes(self._config.tie_word_embeddings)
        shardings = tree_shardings(self._mesh, DEFAULT_RULES, axes, params)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        opt_state = optax.tree.map_params(
            self._tx,
            lambda _, sharding: sharding,
            jax.eval_shape(self._tx.init, params),
            shardings,
            transform_non_params=lambda _: replicated,
        )
        return TrainState(replicated, shardings, opt_state)

    def init(self, params: PyTree[Array]) -> TrainState:
        """A fresh state around float32 masters."""
        shardings = self.state_shardings()
        opt_state = jax.jit(
            self._tx.init,
            out_shardings=None if shardings is None else shardings.opt_state,
        )(params)
        step = jnp.zeros((), jnp.int32)
        if shardings is not None:
            step = jax.device_put(step, shardings.step)
        return TrainState(step, params, opt_state)

    def put(self, batch: PyTree[np.ndarray]) -> PyTree[Array]:
        """Host arrays [micro-batches, rows, ...] to the devices, rows split.

        Every process has all rows, and copies those of its own devices.
        """
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        spec = PartitionSpec(None, DEFAULT_RULES.batch)
        sharding = NamedSharding(self._mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x, x.shape),
            batch,
        )

    def update(
        self, state: TrainState, codes: PyTree, batch: TokenBatch, inputs, count=None
    ) -> UpdateResult:
        """One optimiser step; see :meth:`_update`. ``state`` and ``codes`` are gone."""
        codes = self.release(codes)
        result = self.update_program(state, codes, batch, inputs, count)
        if not self.keeps_codes:
            result = result._replace(codes=self.quantize(result.state.params))
        return result

    def release(self, codes: PyTree) -> PyTree:
        """The codes that an update takes; frees those that it does not keep."""
        if self.keeps_codes:
            return codes
        for x in jax.tree.leaves(codes):
            x.delete()
        return self._no_codes(abstract_params(self._config))

    def _quantize(self, params):
        """FP8 codes of the linear kernels, as far as the recipe uses any."""
        recipe = self._recipe
        if recipe.rollout.linear.forward or recipe.train.linear.forward:
            transposed = recipe.train.linear.dgrad and self.keeps_codes
            return quantize_weights(params, transposed)
        return self._no_codes(params)

    @staticmethod
    def _no_codes(params):
        return jax.tree.map(lambda _: None, params)

    def _weights_for(self, precision: Precision):
        """(params, codes) -> the policy without its masters, for that precision."""
        return functools.partial(
            sampling_weights,
            precision=precision.linear,
            dtype=jnp.dtype(self._config.dtype),
        )

    def _score(self, weights, batch: TokenBatch, count=None):
        """Log-probs [micro-batches, N, R] by the trainer's forward pass.

        Args:
          weights: `frozen_weights` of the policy, or of a reference.
          batch: TokenBatch of [micro-batches, B, T].
          count: int32 scalar, as in `_update`.
        """

        def micro_batch(tokens):
            return {}, rows_of(self._log_probs(weights, tokens), tokens)

        return _for_each(micro_batch, (batch,), count)[1]

    def _gradients(self, params, codes, batch: TokenBatch, inputs, count=None):
        """Gradients, metrics and log-probs of all micro-batches, see `_update`."""
        normalizer = Normalizer.from_mask(
            inputs.mask.reshape(-1, inputs.mask.shape[-1])
        )

        def loss(params, tokens, inputs):
            params = freeze_linear_kernels(params)
            weights = training_weights(params, codes, self._recipe.train.linear)
            log_probs = self._log_probs(
                weights, tokens, remat=self._remat, gradients=buffers
            )
            log_probs = rows_of(log_probs, tokens)
            value, metrics = self._loss_fn(log_probs, inputs, normalizer)
            return value, (metrics, log_probs)

        def micro_batch(*xs):
            value, vjp, aux = jax.vjp(
                lambda params: loss(params, *xs), params, has_aux=True
            )
            vjp.with_refs(buffers)(jnp.ones_like(value))
            return aux

        # Every micro-batch and layer adds into these: `jax.grad` inside the scan would
        # hold a second buffer of all gradients.
        buffers = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), params)
        metrics, log_probs = _for_each(micro_batch, (batch, inputs), count)
        grads = jax.tree.map(jax.freeze, buffers)
        metrics = combine_metrics(metrics) | {
            "global_valid_toks": normalizer.tokens,
            "global_valid_seqs": normalizer.sequences,
        }
        return grads, metrics, log_probs

    def _update(self, state, codes, batch: TokenBatch, inputs, count=None):
        """One optimiser step over a batch cut into micro-batches.

        Args:
          state: masters and optimiser state (donated).
          codes: FP8 codes of the masters (donated).
          batch: TokenBatch of [micro-batches, B, T].
          inputs: pytree of [micro-batches, N, ...] for the loss function, N sequences
            in the B rows; its ``mask`` marks the targets that the loss counts.
          count: int32 scalar, how many micro-batches there are; further ones are not
            looked at. None: all.

        Returns:
          UpdateResult.
        """
        grads, metrics, log_probs = self._gradients(
            state.params, codes, batch, inputs, count
        )
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
        # optax promotes float by int implicitly; callers may have forbidden that.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            lr = jnp.asarray(self._schedule(state.step), jnp.float32)

        def keep_if_finite(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        params = keep_if_finite(params, state.params)
        opt_state = keep_if_finite(opt_state, state.opt_state)
        metrics |= {
            "grad_norm": grad_norm,
            "lr": lr,
            "finite": finite.astype(jnp.float32),
        }
        state = TrainState(state.step + 1, params, opt_state)
        codes = self._quantize(params) if self.keeps_codes else self._no_codes(params)
        return UpdateResult(state, codes, metrics, log_probs)


def _for_each(
    fn: Callable[..., tuple[dict[str, Array], Array]],
    arrays: PyTree[Array],
    count: Int[Array, ""] | None,
) -> tuple[dict[str, Array], Array]:
    """Metrics and log-probs of the first ``count`` slices of arrays, stacked."""

    def at(index):
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), arrays
        )

    def put(index, stacked):
        return jax.tree.map(lambda x, y: x.at[index].set(y), stacked, fn(*at(index)))

    total = jax.tree.leaves(arrays)[0].shape[0]
    metrics, log_probs = jax.eval_shape(lambda: fn(*at(0)))
    stacked = (
        empty_metrics(metrics, total),
        jnp.zeros((total, *log_probs.shape), log_probs.dtype),
    )
    return lax.fori_loop(0, total if count is None else count, put, stacked)


def rows_of(log_probs: Float[Array, "B T"], batch: TokenBatch) -> Float[Array, "N R"]:
    """Log-probs of a micro-batch with a row for every sequence.

    Args:
      log_probs: as the tokens lie.
      batch: TokenBatch of [B, T]; N = B without packing, else B S.
    """
    if batch.index is None:
        return log_probs
    rows, sequences, length = batch.index.shape
    index = batch.index.reshape(rows, sequences * length)
    taken = jnp.take_along_axis(log_probs, index, axis=1, mode="clip")
    return taken.reshape(rows * sequences, length)


def policy_log_probs(
    config: Qwen3Config,
    precision: Precision,
    weights: PyTree,
    batch: TokenBatch,
    *,
    vocab_size: int,
    temperature: float,
    remat: str = "none",
    gradients: PyTree[jax.Ref] | None = None,
) -> Float[Array, "B T"]:
    """Log-probability of every target under the policy at the temperature.

    Args:
      config: the model.
      precision: what runs in FP8.
      weights: masters with or without codes, or the sampler's weights.
      batch: TokenBatch of [B, T].
      vocab_size: ids that have a probability.
      temperature: positive.
      remat: rematerialisation policy of the layers.
      gradients: see `Qwen3.__call__`.
    """
    model = Qwen3(config, weights)
    hidden, _ = model(
        batch.tokens,
        batch.positions,
        precision,
        segments=batch.segments,
        index=batch.index,
        remat=remat,
        gradients=None if gradients is None else gradients["layers"],
    )
    return token_log_probs(
        hidden,
        model.head,
        batch.targets,
        temperature=temperature,
        vocab_size=vocab_size,
        head_gradient=None if gradients is None else head_of(gradients),
    )


def head_of(params: PyTree) -> Any:
    """The leaf that serves as output head."""
    head = params.get("lm_head")
    return params["embed"]["embedding"] if head is None else head["kernel"]


class SupervisedInputs(NamedTuple):
    """Inputs of :func:`negative_log_likelihood`: ``mask`` [B, T] of counted targets."""

    mask: Array


def negative_log_likelihood(
    log_probs: Float[Array, "B T"], inputs: SupervisedInputs, normalizer: Normalizer
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The supervised loss: mean over the counted tokens of the whole batch."""
    counted = jnp.where(inputs.mask.astype(bool), log_probs, 0.0)
    loss = -jnp.sum(counted) / jnp.maximum(normalizer.tokens, 1.0)
    return loss, {"loss": lax.stop_gradient(loss)}
