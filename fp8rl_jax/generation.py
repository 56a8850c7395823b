"""Completions of prompts: from a configuration and options to text."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console

from fp8rl_jax.completions import (
    CompletionPrinter,
    CompletionWriter,
    Sink,
    TextStream,
)
from fp8rl_jax.console import RolloutProgress
from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.experiment import ModelSetup, build_model, engine_limits
from fp8rl_jax.jobs import Job, JobReader
from fp8rl_jax.parallel.processes import check_same
from fp8rl_jax.parallel.start import is_primary
from fp8rl_jax.preemption import PreemptionGuard
from fp8rl_jax.rollout import ContinuousRolloutEngine, SamplingParams, Session
from fp8rl_jax.sampler_weights import load_weights


@dataclasses.dataclass(frozen=True)
class Options:
    """What to complete and how. None takes what the configuration says.

    Attributes:
      prompt: a text; this or ``input``.
      input: JSONL file of prompts.
      output: JSONL file of completions; a prompt's are printed without it.
      checkpoint: run directory to take the weights from.
      step: which of its checkpoints; the latest if None.
      num_samples: completions per prompt.
      temperature: see `SamplingParams`, as the next four.
      top_k: int.
      top_p: float.
      min_p: float.
      max_new_tokens: int.
      stop: texts that end a completion.
      seed: of the sampling noise.
      raw: take the prompt as it is, without the chat template.
      stream: print the text as it is drawn.
    """

    prompt: str | None = None
    input: str | None = None
    output: str | None = None
    checkpoint: str | None = None
    step: int | None = None
    num_samples: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    raw: bool = False
    stream: bool = False

    def __post_init__(self):
        if (self.prompt is None) == (self.input is None):
            raise ValueError("give either --prompt=TEXT or --input=FILE")
        if self.input is not None and self.output is None:
            raise ValueError("--input needs --output=FILE for the completions")
        if self.input and Path(self.input).resolve() == Path(self.output).resolve():
            raise ValueError("--output would replace --input: give another file")
        if self.stream and (self.output is not None or self.num_samples != 1):
            raise ValueError("--stream prints one sample of one --prompt, no --output")
        if self.step is not None and self.checkpoint is None:
            raise ValueError("--step needs --checkpoint=RUN_DIR")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed={self.seed} must be in [0, 2**32)")

    def sampling(self, config: ConfigDict, stop_ids: tuple[int, ...]) -> SamplingParams:
        """How completions are drawn."""
        names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
        values = {name: getattr(self, name) for name in names}
        return SamplingParams(
            num_samples=self.num_samples,
            stop_ids=stop_ids,
            stop_strings=tuple(self.stop),
            **{n: config.sampling[n] if v is None else v for n, v in values.items()},
        )


def generate(config: ConfigDict, options: Options) -> bool:
    """Draws completions; the primary process prints or writes them.

    Returns:
      False if a signal ended it early.

    Raises:
      ValueError: options, a line of the input, weights or a checkpoint that cannot
        work; nothing has been sampled by then.
      OSError: the output cannot be written.
      FloatingPointError: a log-prob is not finite.
    """
    setup = build_model(config)
    tokenizer = setup.tokenizer
    sampling = options.sampling(config, tokenizer.stop_ids)
    jobs = _jobs(options, setup, sampling)
    seed = config.seed if options.seed is None else options.seed
    engine = ContinuousRolloutEngine(
        setup.model,
        setup.recipe.rollout,
        tokenizer.vocab_size,
        setup.mesh,
        limits=engine_limits(config),
        decode=tokenizer.decode,
    )
    check_same(
        {"configuration": config.to_dict(), "options": options, "input": jobs},
        "give all the same flags and files",
    )
    with _sink(options, jobs, tokenizer) as sink, jax.set_mesh(setup.mesh):
        weights, source = load_weights(config, setup, options.checkpoint, options.step)
        _note(
            f"Weights: {source}, {setup.model.num_parameters:,} parameters. Recipe: "
            f"{config.recipe}. Mesh: {dict(setup.mesh.shape)} of "
            f"{jax.devices()[0].device_kind}."
        )
        with engine.session(
            weights, (seed, 0), on_tokens=sink.on_tokens, **_session_size(jobs)
        ) as session:
            _note(str(session.capacity))
            finished = _run(session, jobs, sink, quiet=options.stream)
            metrics = session.metrics()
        if finished:
            sink.finish()
    _note(
        f"{metrics['rollout/generated_tokens']:,.0f} tokens, "
        f"{metrics['rollout/tokens_per_sec']:,.0f} a second."
    )
    if not finished:
        _note(f"Stopped early. {sink.kept()}")
    return finished


def _sink(options: Options, jobs: Sequence[Job], tokenizer: Tokenizer) -> Sink:
    if not is_primary():
        return Sink()
    if options.output is not None:
        return CompletionWriter(options.output, jobs, tokenizer.decode)
    if options.stream:
        return TextStream(tokenizer.decode)
    return CompletionPrinter(tokenizer.decode)


def _jobs(options: Options, setup: ModelSetup, sampling: SamplingParams) -> list[Job]:
    reader = JobReader(
        setup.tokenizer, sampling, setup.model.max_position_embeddings, options.raw
    )
    if options.input is not None:
        return reader.read(options.input)
    return [reader.job({"prompt": options.prompt}, 1)]


def _session_size(jobs: Sequence[Job]) -> dict[str, int]:
    """Arguments of a session that holds these jobs."""
    requests = [job.request for job in jobs]
    return {
        "max_length": max(len(r.prompt) + r.sampling.max_new_tokens for r in requests),
        "longest_prompt": max(len(r.prompt) for r in requests),
        "num_prompts": len(requests),
        "num_sequences": sum(r.sampling.num_samples for r in requests),
    }


def _run(session: Session, jobs: Sequence[Job], sink: Sink, quiet: bool) -> bool:
    """Samples all jobs; returns whether it came to the end."""
    numbers = {session.submit(job.request): i for i, job in enumerate(jobs)}
    total = sum(job.request.sampling.num_samples for job in jobs)
    quiet = quiet or not is_primary()
    progress = RolloutProgress(total, Console(stderr=True, quiet=quiet))
    with PreemptionGuard("stopping after this step") as guard, progress:
        while session.has_work and not guard.should_stop():
            completions = session.step()
            for completion in completions:
                sink.add(numbers[completion.request], completion)
            progress(session, completions)
    return not session.has_work


def _note(text: str) -> None:
    """Tells the user; stdout has completions alone."""
    if is_primary():
        print(text, file=sys.stderr, flush=True)
