"""What a run takes of a device's memory, phase by phase, before anything is compiled.

Arrays are counted exactly, from the shapes and shardings that the learner declares;
what programs need beside them is `activation_memory`'s estimate. The devices need not
exist: an abstract mesh will do.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from fp8rl_jax.activation_memory import (
    Shards,
    backward_bytes,
    forward_bytes,
    kept_bytes,
)
from fp8rl_jax.attention import page_size
from fp8rl_jax.fp8 import Recipe, ScaledArray
from fp8rl_jax.fp8.weights import WeightCodes
from fp8rl_jax.learner import Learner
from fp8rl_jax.models.qwen3.axes import param_axes
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.parallel.mesh import make_abstract_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import named_sharding, scale_sharding
from fp8rl_jax.rollout import Capacity, EngineLimits
from fp8rl_jax.rollout.capacity import size_session
from fp8rl_jax.rollout.programs import Policy, page_bytes

GB = 10**9
# Ids, targets, positions, segments, places, mask, advantages, three log-probs and the
# results of a token, four bytes each.
_BYTES_PER_TOKEN = 44
_PLATFORM = "gpu"  # pages as where there are kernels


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step asks of one device, and how it samples.

    Attributes:
      micro_batch_tokens: of a forward and backward pass, padding included.
      update_tokens: of all micro-batches of an optimiser step.
      remat: rematerialisation policy of the layers.
      reference: whether there is a reference policy (a KL penalty).
      recomputed: whether the old log-probs are recomputed.
      limits: of the sampler; with ``max_length``.
      longest_prompt: tokens.
      num_prompts: of a step, on all devices.
      num_sequences: samples of them.
    """

    micro_batch_tokens: int
    update_tokens: int
    remat: str
    reference: bool
    recomputed: bool
    limits: EngineLimits
    longest_prompt: int
    num_prompts: int
    num_sequences: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest device.

    Attributes:
      phases: of each phase, what lies in memory at its peak, part by part.
      device_bytes: what the device has for all of it.
      capacity: pages and slots of the sampler in what is left to it.
    """

    phases: Mapping[str, Mapping[str, int]]
    device_bytes: int
    capacity: Capacity

    def peak(self, phase: str) -> int:
        """Bytes at the peak of a phase."""
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.peak)

    @property
    def fits(self) -> bool:
        """Whether the device has room for every phase."""
        return self.peak(self.worst_phase) <= self.device_bytes

    def rows(self) -> list[dict[str, str]]:
        """A table in GB: a column for each phase; a row for each part, then totals."""
        parts = dict.fromkeys(part for phase in self.phases.values() for part in phase)
        table = {part: [p.get(part, 0) for p in self.phases.values()] for part in parts}
        table["programs"] = table.pop("programs")  # last, as the one estimate
        table["peak"] = [self.peak(phase) for phase in self.phases]
        table["of"] = [self.device_bytes] * len(self.phases)
        return [
            {"GB per device": part}
            | {
                phase: f"{x / GB:.1f}" if x else ""
                for phase, x in zip(self.phases, cells, strict=True)
            }
            for part, cells in table.items()
            if any(cells)
        ]


def plan_memory(
    model: Qwen3Config,
    recipe: Recipe,
    learner: Learner,
    mesh: Mesh | AbstractMesh,
    work: Workload,
    device_bytes: int,
) -> MemoryPlan:
    """Adds up what each phase of a step needs.

    Every phase has the masters, the moments and the reference policy, and the codes,
    if an update keeps them.
    Sampling adds its weights, the pages and the largest of its programs; scoring, the
    weights it reads; an update, one gradient buffer that is sharded like the masters,
    what the layers keep for the backward pass, and the backward pass of a layer.

    Args:
      model: its shape.
      recipe: what runs in FP8.
      learner: on ``mesh``.
      mesh: devices that need not be there.
      work: what a step asks for.
      device_bytes: what a device has.
    """
    shards = Shards(mesh.shape["fsdp"], mesh.shape["tensor"])
    state = learner.abstract_state()
    codes = jax.eval_shape(learner.quantize, state.params)
    axes = param_axes(model.tie_word_embeddings)

    def of_weights(fn: Callable[..., Any], shared: bool, on=mesh) -> int:
        weights = jax.eval_shape(fn, state.params, codes)
        return _weight_bytes(on, axes, weights, codes=not shared)

    resident = {
        "masters": _state_bytes(state.params),
        "moments": _state_bytes(state.opt_state),
        "weight codes": _weight_bytes(mesh, axes, codes),
    }
    if work.reference:
        # Its codes are those of weights that are no more.
        resident["reference policy"] = of_weights(learner.frozen_weights, shared=False)

    gathered = 0
    if shards.fsdp > 1:
        # The engine's programs run on whole weights, but for the tensor axis.
        whole = make_abstract_mesh(1, 1, shards.tensor, shards.tensor)
        gathered = of_weights(learner.rollout_weights, shared=False, on=whole)
    sampling, capacity = _sampling(
        model,
        recipe,
        mesh,
        work,
        of_weights(learner.rollout_weights, shared=True),
        gathered,
        device_bytes - sum(resident.values()),
    )
    phases = {"sampling": resident | sampling}
    linear = recipe.train.linear
    tokens = work.micro_batch_tokens
    batch = {"batch": work.update_tokens * _BYTES_PER_TOKEN}
    if work.reference or work.recomputed:
        weights = 0
        if work.recomputed:
            weights = of_weights(learner.frozen_weights, shared=True)
        scoring = {
            "trainer's bf16 weights": weights,
            "programs": forward_bytes(model, linear, tokens, shards),
        }
        phases["log-probs"] = resident | batch | scoring
    if not learner.keeps_codes:
        resident.pop("weight codes")
    phases["update"] = (
        resident
        | batch
        | {
            "gradients": _state_bytes(state.params),
            "kept by the layers": kept_bytes(
                model, linear, tokens, work.remat, shards.tensor
            ),
            "programs": backward_bytes(model, linear, tokens, shards),
        }
    )
    return MemoryPlan(phases, device_bytes, capacity)


def _sampling(
    model: Qwen3Config,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    work: Workload,
    weights: int,
    gathered: int,
    free: int,
) -> tuple[dict[str, int], Capacity]:
    """What sampling adds, given its weights and what the device has left for it."""
    policy = Policy(model, recipe.rollout, model.vocab_size, mesh)
    limits = work.limits
    page = page_size(limits.max_length, _PLATFORM)
    per_page = page_bytes(model, recipe.rollout, page)
    # At least one sequence, so that a plan without room says how much it lacks.
    least = math.ceil((-(-limits.max_length // page) + 1) * per_page)
    capacity = size_session(
        policy,
        limits,
        max(free - weights, math.ceil(least / limits.memory_fraction)),
        _PLATFORM,
        max_length=limits.max_length,
        longest_prompt=work.longest_prompt,
        num_prompts=work.num_prompts,
        num_sequences=work.num_sequences,
    )
    on_a_shard = Shards(1, mesh.shape["tensor"])
    tokens = max(capacity.prefill_rows * capacity.prefill_length, capacity.num_slots)
    programs = forward_bytes(model, recipe.rollout.linear, tokens, on_a_shard)
    parts = {
        "sampler's bf16 weights": weights,
        "sampler's weights, gathered": gathered,
        "key-value pages": capacity.num_pages * per_page,
        "programs": max(programs, capacity.page_copies * per_page),
    }
    return parts, capacity


def _bytes(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _state_bytes(tree: PyTree[jax.ShapeDtypeStruct]) -> int:
    """Of arrays that bear their shardings."""
    return sum(_bytes(x, x.sharding) for x in jax.tree.leaves(tree))


def _weight_bytes(
    mesh: Mesh | AbstractMesh, axes: PyTree, weights: PyTree, codes: bool = True
) -> int:
    """Of parameters and codes, which the compiler shards as the masters are.

    Args:
      mesh: the devices.
      axes: logical axes of the parameters.
      weights: a tree like ``axes`` of arrays, `ScaledArray`, `WeightCodes` or None.
      codes: whether codes count; not if they are shared with others.
    """

    def of(axes, x) -> int:
        if x is None:
            return 0
        if isinstance(x, WeightCodes):
            *lead, out, features = axes
            return of(axes, x.codes) + of((*lead, features, out), x.transposed)
        if isinstance(x, ScaledArray):
            if not codes:
                return 0
            scales = scale_sharding(mesh, DEFAULT_RULES, axes, x.shape, x.block)
            return of(axes, x.codes) + _bytes(x.scales, scales)
        return _bytes(x, named_sharding(mesh, DEFAULT_RULES, axes))

    sizes = jax.tree.map(
        of, axes, weights, is_leaf=lambda node: isinstance(node, tuple)
    )
    return sum(jax.tree.leaves(sizes))
