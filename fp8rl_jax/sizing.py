"""Whether a configuration fits its devices, and what would make it fit."""

import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from fp8rl_jax.console import print_table
from fp8rl_jax.data.batching import bucket_length
from fp8rl_jax.experiment import build_training, engine_limits
from fp8rl_jax.memory_plan import GB, MemoryPlan, Workload, plan_memory
from fp8rl_jax.parallel.mesh import make_abstract_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import num_shards
from fp8rl_jax.parallel.start import is_primary

# Of a device with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, in GB (10^9 bytes): an H200 has
# 150.7, an H100 of 80 GB 84.9.
_DEVICE_MEMORY_GB = {"h200": 138.7, "h100": 78.1}
_BLOCK = 128
_WORTH_NAMING = GB // 20  # bytes that an option must save


def check_memory(config: ConfigDict, mesh: Mesh) -> None:
    """Prints the plan of a run and refuses one without room, at start-up.

    Where the devices do not say what they have (CPU), does nothing.

    Args:
      config: the run's.
      mesh: its devices.

    Raises:
      ValueError: as of `check_fits`.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(stats):
        return
    plan = plan_run(config, mesh, min(s["bytes_limit"] for s in stats))
    if is_primary():
        print_table(plan.rows(), title="Memory plan")
    check_fits(config, mesh, plan)


def device_memory_gb(kind: str) -> float:
    """What JAX may use of a device, 10^9 bytes.

    Raises:
      ValueError: a kind that is not known; the message lists those that are.
    """
    if kind not in _DEVICE_MEMORY_GB:
        raise ValueError(
            f"--device={kind}: choose one of {', '.join(_DEVICE_MEMORY_GB)}, or give "
            "--device_memory_gb."
        )
    return _DEVICE_MEMORY_GB[kind]


def print_plan(config: ConfigDict, num_devices: int, device_gb: float) -> None:
    """Prints the plan of a run on devices that need not be there.

    Args:
      config: the run's.
      num_devices: how many there would be.
      device_gb: what one has, 10^9 bytes.

    Raises:
      ValueError: an option that cannot work, or as of `check_fits`.
    """
    mesh = make_abstract_mesh(**config.mesh, num_devices=num_devices)
    plan = plan_run(config, mesh, int(device_gb * GB))
    print_table(plan.rows(), title=f"Mesh {dict(mesh.shape)}")
    if plan.peak("sampling") <= plan.device_bytes:
        print(plan.capacity)
    check_fits(config, mesh, plan)


def plan_run(
    config: ConfigDict, mesh: Mesh | AbstractMesh, device_bytes: int
) -> MemoryPlan:
    """The memory plan of a configuration; sequences may all be of the longest length.

    Args:
      config: the run's; `fp8rl_jax.config` has the options.
      mesh: devices that need not be there.
      device_bytes: what a device has.

    Raises:
      ValueError: an option that cannot work, as of `experiment.build`.
    """
    setup = build_training(config, mesh)
    loss, g = setup.algorithm.loss, config.grpo
    longest = config.task.max_prompt_length + config.sampling.max_new_tokens
    shards = num_shards(mesh, DEFAULT_RULES, "batch")
    sequences = g.num_prompts_per_step * g.num_generations_per_prompt
    row = bucket_length(longest - 1)
    tokens = config.train.tokens_per_micro_batch
    work = Workload(
        micro_batch_tokens=tokens or config.train.micro_batch_size // shards * row,
        update_tokens=sequences // g.num_mini_batches // shards * row,
        remat=config.train.remat,
        reference=loss.kl_coefficient > 0,
        recomputed=loss.old_policy == "recomputed",
        limits=engine_limits(config, longest),
        longest_prompt=config.task.max_prompt_length,
        num_prompts=g.num_prompts_per_step,
        num_sequences=sequences,
    )
    return plan_memory(
        setup.model, setup.recipe, setup.learner, mesh, work, device_bytes
    )


def check_fits(config: ConfigDict, mesh: Mesh | AbstractMesh, plan: MemoryPlan) -> None:
    """Refuses a plan without room.

    Args:
      config: the run's.
      mesh: its devices.
      plan: of both.

    Raises:
      ValueError: the phase, what it needs, what there is, and which options would help
        with how much each would save.
    """
    if plan.fits:
        return
    phase = plan.worst_phase
    needed = plan.peak(phase)
    savings = []
    for option, changed, on in _alternatives(config, mesh):
        try:
            saved = needed - plan_run(changed, on, plan.device_bytes).peak(phase)
        except ValueError:
            continue  # An option that cannot work here is none.
        if saved >= _WORTH_NAMING:
            savings.append(f"{option} ({saved / GB:.1f} GB less)")
    remedy = "use a smaller model"
    if savings:
        remedy = f"what would help: {', '.join(savings)}"
    raise ValueError(
        f"out of memory before it starts: the {phase} phase needs {needed / GB:.1f} GB "
        f"per device and JAX has {plan.device_bytes / GB:.1f} GB "
        f"(XLA_PYTHON_CLIENT_MEM_FRACTION); {remedy}."
    )


def _alternatives(
    config: ConfigDict, mesh: Mesh | AbstractMesh
) -> Iterator[tuple[str, ConfigDict, Mesh | AbstractMesh]]:
    """Options that save memory, each alone, and the run that they would give."""
    optimizer, train = config.optimizer, config.train
    if {optimizer.mu_dtype, optimizer.nu_dtype} != {"bfloat16"}:
        changes = {"optimizer.mu_dtype": "bfloat16", "optimizer.nu_dtype": "bfloat16"}
        text = "optimizer.mu_dtype=bfloat16 and optimizer.nu_dtype=bfloat16"
        yield text, _changed(config, changes), mesh
    options = {}
    if train.remat != "full":
        options["train.remat"] = "full"
    if train.keep_codes:
        options["train.keep_codes"] = False
    longest = config.task.max_prompt_length + config.sampling.max_new_tokens
    rows = num_shards(mesh, DEFAULT_RULES, "batch")
    if train.tokens_per_micro_batch:
        options["train.tokens_per_micro_batch"] = -(-longest // _BLOCK) * _BLOCK
    elif train.micro_batch_size > rows:
        options["train.micro_batch_size"] = rows
    if config.sampling.memory_fraction > 0.5:
        options["sampling.memory_fraction"] = 0.5
    for name, value in options.items():
        yield f"{name}={value}", _changed(config, {name: value}), mesh
    sizes = dict(mesh.shape)
    sizes["fsdp"] *= 2
    num_devices = math.prod(sizes.values())
    text = f"{num_devices} devices with mesh.fsdp={sizes['fsdp']}"
    yield text, config, make_abstract_mesh(**sizes, num_devices=num_devices)


def _changed(config: ConfigDict, changes: dict[str, object]) -> ConfigDict:
    changed = config.copy_and_resolve_references()
    with changed.unlocked():
        changed.update_from_flattened_dict(changes)
    return changed
