"""Whole GRPO steps at fixed lengths: the FP8 ladder against bf16 of the same run.

    python -m benchmarks.grpo_step --size=8b --results=grpo_step.jsonl
    python -m benchmarks.grpo_step --size=8b --rung=fp8 --results=grpo_step.jsonl

Random weights of the real shapes draw ``--prompts`` x ``--samples`` completions of
exactly ``--new_tokens``; the update packs them, and every token counts. Rungs:

* bf16_recomputed: the conventional step; the trainer evaluates the old log-probs.
* bf16: the sampler's log-probs are the old ones.
* fp8_rollout_linear, fp8_rollout: FP8 in the sampler alone (its linear layers; its
  KV cache and attention too), a bf16 trainer with recomputed log-probs and truncated
  importance sampling.
* fp8: one FP8 policy in both.
* fp8_equal_residency: fp8 with as many sequences at once as bf16 had.

The first step compiles and is not counted. Every step is appended to ``--results`` as
it ends. A rung that has all its steps there is not run again; ratios are formed within
the file, so give each machine and session its own.

Hardware: one H200 for 8b at 16K tokens a micro-batch; about four minutes a rung.
"""

import dataclasses
import functools
import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks.device_time import kernel_times
from fp8rl_jax.console import print_table
from fp8rl_jax.data.batching import BLOCK, place_on_targets, token_rows
from fp8rl_jax.data.layout import pack
from fp8rl_jax.fp8 import get_recipe
from fp8rl_jax.grpo import LossConfig, LossInputs, group_advantages, policy_loss, preset
from fp8rl_jax.learner import Learner
from fp8rl_jax.models.qwen3.config import QWEN3_SIZES, Qwen3Config
from fp8rl_jax.models.qwen3.init import init_params
from fp8rl_jax.optimizer import OptimizerConfig
from fp8rl_jax.parallel.mesh import make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES
from fp8rl_jax.parallel.sharding import num_shards
from fp8rl_jax.rollout import (
    ContinuousRolloutEngine,
    EngineLimits,
    Prompts,
    SamplingParams,
)

_TIS = 2.0
_ON_POLICY: dict[str, Any] = {}
_RECOMPUTED = {"old_policy": "recomputed"}
_CORRECTED = {"old_policy": "recomputed", "tis_ratio": _TIS}
# Recipe, loss, whether it may hold no more sequences than bf16 had.
RUNGS = {
    "bf16_recomputed": ("bf16", _RECOMPUTED, False),
    "bf16": ("bf16", _ON_POLICY, False),
    "fp8_rollout_linear": ("fp8_rollout_linear", _CORRECTED, False),
    "fp8_rollout": ("fp8_rollout", _CORRECTED, False),
    "fp8": ("fp8", _ON_POLICY, False),
    "fp8_equal_residency": ("fp8", _ON_POLICY, True),
}

_SIZE = flags.DEFINE_enum("size", "8b", list(QWEN3_SIZES), "Size of model.")
_RUNGS = flags.DEFINE_multi_enum("rung", None, list(RUNGS), "Which; all if not given.")
_RESULTS = flags.DEFINE_string("results", "grpo_step.jsonl", "File of measured steps.")
_PROMPTS = flags.DEFINE_integer("prompts", 32, "Of a step.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Of a prompt.", lower_bound=2)
_PROMPT_LENGTH = flags.DEFINE_integer("prompt_length", 256, "Tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 1024, "Tokens.", lower_bound=1)
_TOKENS = flags.DEFINE_integer(
    "tokens_per_micro_batch",
    16384,
    "Packed, of a device, at most: so many as whole sequences fill.",
    lower_bound=128,
)
_STEPS = flags.DEFINE_integer("steps", 3, "Measured, after the first.", lower_bound=1)
_REMAT = flags.DEFINE_string("remat", "full", "Rematerialisation policy.")
_KEEP_CODES = flags.DEFINE_bool("keep_codes", True, "FP8 codes of all layers.")
_MOMENTS = flags.DEFINE_string("moments", "bfloat16", "Dtype of the stored moments.")
_FSDP = flags.DEFINE_integer("fsdp", 1, "Shards of the parameters.")
_TENSOR = flags.DEFINE_integer("tensor", 1, "Shards of heads and features.")
_MAX_SLOTS = flags.DEFINE_integer("max_slots", 1024, "Sequences at once, per device.")
_PROFILE = flags.DEFINE_integer(
    "profile", 0, "Kernels of the update to list, in one more step."
)
_NUM_LAYERS = flags.DEFINE_integer("num_layers", None, "In place of the size's own.")

_DENSE_PEAK = 989e12  # FLOP/s of one H200 in bf16
_NOT_COMPARED = ("rung", "step", "time", "host")


def update_flops(config: Qwen3Config, lengths: np.ndarray) -> float:
    """Model FLOPs of forward and backward over causal sequences, recomputation not
    counted: 6 a weight and token, and attention's two products over half the pairs."""
    embedding = config.vocab_size * config.hidden_size
    weights = config.num_parameters - embedding
    if config.tie_word_embeddings:
        weights += embedding  # the head's product
    width = config.num_layers * config.num_heads * config.head_dim
    pairs = float(np.sum(np.square(lengths, dtype=np.float64))) / 2
    return 6.0 * weights * float(lengths.sum()) + 12.0 * width * pairs


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all rungs of a table share; a file may hold several."""

    size: str
    num_layers: int
    devices: int
    fsdp: int
    tensor: int
    prompts: int
    samples: int
    prompt_length: int
    new_tokens: int
    tokens_per_micro_batch: int
    remat: str
    keep_codes: bool
    moments: str
    max_slots: int


class Step:
    """A rung's state and programs."""

    def __init__(self, settings: Settings, config: Qwen3Config, rung: str, slots: int):
        recipe_name, loss, _ = RUNGS[rung]
        recipe = get_recipe(recipe_name)
        algorithm = preset("grpo", max_response_length=settings.new_tokens)
        self._settings, self._config = settings, config
        self._loss: LossConfig = dataclasses.replace(algorithm.loss, **loss)
        self._rule = jax.jit(
            functools.partial(group_advantages, config=algorithm.advantages)
        )
        mesh = make_mesh(fsdp=settings.fsdp, tensor=settings.tensor)
        self._mesh = mesh
        never_drawn = config.vocab_size - 1
        self._sampling = SamplingParams(
            max_new_tokens=settings.new_tokens,
            stop_ids=(never_drawn,),
            num_samples=settings.samples,
        )
        vocab_size = min(151_669, never_drawn)
        self.learner = Learner(
            config,
            recipe,
            OptimizerConfig(1e-6, mu_dtype=settings.moments, nu_dtype=settings.moments),
            functools.partial(policy_loss, config=self._loss),
            vocab_size=vocab_size,
            remat=settings.remat,
            keep_codes=settings.keep_codes,
            mesh=mesh,
        )
        longest = settings.prompt_length + settings.new_tokens
        self.engine = ContinuousRolloutEngine(
            config,
            recipe.rollout,
            vocab_size,
            mesh,
            limits=EngineLimits(max_slots=slots, max_length=longest),
        )
        shardings = self.learner.state_shardings()
        params = init_params(config, jax.random.key(0), shardings.params)
        self.state = self.learner.init(params)
        self.codes = self.learner.quantize(self.state.params)
        self._update = None
        self.update_bytes = 0

    def run(self, number: int, profile: bool = False) -> dict[str, float]:
        """One step: seconds of each phase and what else there is to say.

        With ``profile``, prints the kernels of the update as well.
        """
        s, marks = self._settings, [time.perf_counter()]

        def done(*arrays):
            jax.block_until_ready(arrays)
            marks.append(time.perf_counter())

        rng = np.random.default_rng(number)
        shape = s.prompts, s.prompt_length
        prompts = rng.integers(0, self._config.vocab_size - 300, shape).tolist()
        ids = np.arange(s.prompts * s.samples).reshape(s.prompts, s.samples)
        weights = self.learner.rollout_weights(self.state.params, self.codes)
        rollouts = self.engine.generate(
            weights, Prompts(prompts, ids), self._sampling, (0, number)
        )
        sampled = dict(self.engine.metrics)
        del weights
        done()
        rows = [p for p in prompts for _ in range(s.samples)]
        tokens, mask = token_rows(rows, rollouts.completions())
        shards = num_shards(self._mesh, DEFAULT_RULES, "batch")
        layout = pack(tokens, mask, s.tokens_per_micro_batch, shards)
        batch = self.learner.put(layout.batch)
        count = np.int32(layout.num_micro_batches)
        rewards = rng.random((s.prompts, s.samples), np.float32)
        advantages = np.asarray(self._rule(rewards)).reshape(-1)
        old = None
        if self._loss.old_policy == "recomputed":
            frozen = self.learner.frozen_weights(self.state.params, self.codes)
            old = layout.restore(np.asarray(self.learner.score(frozen, batch, count)))
            del frozen
        done()
        placed = place_on_targets(rollouts.log_probs, mask)
        inputs = layout.take(LossInputs(mask, advantages, old, placed))
        codes = self.learner.release(self.codes)
        args = self.state, codes, batch, self.learner.put(inputs), count
        if self._update is None:
            self._update = self.learner.update_program.lower(*args).compile()
            memory = self._update.memory_analysis()
            self.update_bytes = (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes
                + memory.temp_size_in_bytes
            )
        if profile:
            result = None

            def update():
                nonlocal result
                result = self._update(*args)
                return result.metrics

            _print_kernels(kernel_times(update))
        else:
            result = self._update(*args)
        self.state, self.codes = result.state, result.codes
        if not s.keep_codes:
            self.codes = self.learner.quantize(self.state.params)
        done(result)
        metrics = {k: float(v) for k, v in jax.device_get(result.metrics).items()}
        rollout, log_probs, update = np.diff(marks).tolist()
        lengths = np.full(len(rows), s.prompt_length + s.new_tokens - 1)
        flops = update_flops(self._config, lengths)
        return {
            "rollout_s": rollout,
            "log_probs_s": log_probs,
            "update_s": update,
            "step_s": rollout + log_probs + update,
            "mfu": flops / update / (_DENSE_PEAK * s.devices),
            "token_share": layout.token_share,
            "tokens": int(len(rows) * (s.prompt_length + s.new_tokens)),
            "update_bytes": self.update_bytes,
            "bytes_in_use": _memory("bytes_in_use"),
            "peak_bytes": _memory("peak_bytes_in_use"),
            "capacity": self.engine.description,
            "resident": self.engine.capacity.resident,
            "kv_tokens": self.engine.capacity.num_tokens,
            **{k: metrics[k] for k in _REPORTED if k in metrics},
            **{k: v for k, v in sampled.items() if k.startswith("rollout/")},
        }


_REPORTED = (
    "loss",
    "grad_norm",
    "finite",
    "token_mult_prob_error",
    "gen_kl_error",
    "logprob_abs_diff",
    "logprob_abs_diff_max",
)


def _print_kernels(times: dict[str, tuple[int, float]]) -> None:
    total = sum(seconds for _, seconds in times.values())
    rows = [
        {
            "kernel": name[:80],
            "launches": str(count),
            "s": f"{seconds:.3f}",
            "%": f"{100 * seconds / total:.1f}",
        }
        for name, (count, seconds) in list(times.items())[: _PROFILE.value]
    ]
    print_table(rows, f"Kernels of an update, {total:.2f} s")


def _memory(name: str) -> int:
    stats = jax.local_devices()[0].memory_stats()
    return stats[name] if stats else 0


def read_steps(path: Path, settings: Settings) -> dict[str, list[dict]]:
    """The measured steps of each rung under these settings."""
    found: dict[str, list[dict]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in map(json.loads, lines):
        if line["settings"] == dataclasses.asdict(settings):
            found.setdefault(line["rung"], []).append(line)
    return found


def run_rung(settings, config, rung: str, path: Path) -> None:
    """Runs the steps of a rung and appends them to the file."""
    slots = settings.max_slots
    if RUNGS[rung][2]:
        bf16 = read_steps(path, settings).get("bf16")
        if not bf16:
            print(f"{rung} needs the figures of bf16: run that rung first.")
            return
        slots = bf16[-1]["resident"] // settings.devices
    start = time.perf_counter()
    step = Step(settings, config, rung, slots)
    with jax.set_mesh(step._mesh):
        for number in range(_STEPS.value + 1):
            measured = step.run(number)
            if number == 0:
                print(f"{rung}: first step after {time.perf_counter() - start:.0f} s")
                print(measured, flush=True)
                continue
            if measured["finite"] != 1.0:
                raise FloatingPointError(f"{rung}: the update was not finite.")
            line = {
                "rung": rung,
                "step": number,
                "time": time.strftime("%Y-%m-%d %H:%M"),
                "host": f"{socket.gethostname()} {jax.devices()[0].device_kind}",
                "settings": dataclasses.asdict(settings),
                **measured,
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
        if _PROFILE.value:
            step.run(_STEPS.value + 1, profile=True)


def _spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(steps: dict[str, list[dict]]) -> list[dict[str, str]]:
    """A row a rung, ratios to both bf16 rungs where they are there."""
    median = {
        rung: statistics.median(line["step_s"] for line in lines)
        for rung, lines in steps.items()
    }
    rows = []
    for rung in RUNGS:
        if rung not in steps:
            continue
        lines = steps[rung]
        last = lines[-1]

        def column(name, lines=lines):
            return _spread([line[name] for line in lines])

        rows.append(
            {
                "rung": rung,
                "rollout s": column("rollout_s"),
                "log-probs s": column("log_probs_s"),
                "update s": column("update_s"),
                "step s": column("step_s"),
                "over bf16": _ratio(median, "bf16", rung),
                "over recomputed": _ratio(median, "bf16_recomputed", rung),
                "tok/s": f"{last['tokens'] / median[rung]:,.0f}",
                "MFU": f"{100 * statistics.median(x['mfu'] for x in lines):.1f} %",
                "update GB": f"{last['update_bytes'] / 1e9:.1f}",
                "resident": str(last["resident"]),
                "KV tokens": f"{last['kv_tokens']:,}",
                "gen_kl": f"{last.get('gen_kl_error', float('nan')):.2g}",
                "max |d|": f"{last.get('logprob_abs_diff_max', float('nan')):.2g}",
                "mult error": f"{last.get('token_mult_prob_error', 0):.6f}",
            }
        )
    return rows


def _ratio(median: dict[str, float], base: str, rung: str) -> str:
    return f"{median[base] / median[rung]:.2f}" if base in median else ""


def main(argv: list[str]) -> None:
    """Runs what is missing and prints the table."""
    del argv
    config = QWEN3_SIZES[_SIZE.value]
    if _NUM_LAYERS.value:
        config = dataclasses.replace(config, num_layers=_NUM_LAYERS.value)
    sequence = -(-(_PROMPT_LENGTH.value + _NEW_TOKENS.value - 1) // BLOCK) * BLOCK
    settings = Settings(
        size=_SIZE.value,
        num_layers=config.num_layers,
        devices=jax.device_count(),
        fsdp=_FSDP.value,
        tensor=_TENSOR.value,
        prompts=_PROMPTS.value,
        samples=_SAMPLES.value,
        prompt_length=_PROMPT_LENGTH.value,
        new_tokens=_NEW_TOKENS.value,
        tokens_per_micro_batch=max(_TOKENS.value // sequence, 1) * sequence,
        remat=_REMAT.value,
        keep_codes=_KEEP_CODES.value,
        moments=_MOMENTS.value,
        max_slots=_MAX_SLOTS.value,
    )
    path = Path(_RESULTS.value)
    for rung in _RUNGS.value or RUNGS:
        if len(read_steps(path, settings).get(rung, [])) < _STEPS.value:
            run_rung(settings, config, rung, path)
    steps = read_steps(path, settings)
    title = f"GRPO steps, {settings.size}, {jax.devices()[0].device_kind}"
    print_table(table(steps), title)


if __name__ == "__main__":
    app.run(main)
