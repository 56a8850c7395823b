"""The rollout engine: continuous batching over a pool of pages."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from fp8rl_jax.fp8 import Precision
from fp8rl_jax.models.qwen3.config import Qwen3Config
from fp8rl_jax.parallel.processes import fetch
from fp8rl_jax.rollout import programs
from fp8rl_jax.rollout.capacity import Capacity, EngineLimits, plan_capacity
from fp8rl_jax.rollout.plans import DecodePlan
from fp8rl_jax.rollout.programs import Chunks, Copies, Policy, Rows
from fp8rl_jax.rollout.scheduler import Scheduler
from fp8rl_jax.rollout.sequence import Event
from fp8rl_jax.rollout.stop_strings import StopStrings
from fp8rl_jax.rollout.types import (
    Completion,
    FinishReason,
    Prompts,
    Request,
    Rollouts,
    SamplingParams,
)

# Request, sample, its new tokens and their log-probs.
OnTokens = Callable[[int, int, Int[np.ndarray, "T"], Float[np.ndarray, "T"]], None]


class ContinuousRolloutEngine:
    """Samples with every slot full: sequences come and go between decode steps.

    The prompt is prefilled once for its G samples, which share its full pages. When
    pages run out, the youngest sequences wait and are recomputed later; a completion
    is the same whatever the others do.

    Args:
      config: the model.
      precision: what runs in FP8 while sampling.
      vocab_size: the tokenizer's ids; ids from here up to the model's vocabulary are
        padding and are never drawn.
      mesh: sequences are split over its batch axes; None for one device.
      limits: slots, pages and the size of steps; the defaults if None.
      decode: text of token ids; needed for stop strings alone.

    Raises:
      ValueError: ``vocab_size`` does not fit the model.
    """

    def __init__(
        self,
        config: Qwen3Config,
        precision: Precision,
        vocab_size: int,
        mesh: Mesh | None = None,
        *,
        limits: EngineLimits | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        if not 0 < vocab_size <= config.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} must be positive and at most the model's "
                f"{config.vocab_size}."
            )
        self._policy = Policy(config, precision, vocab_size, mesh)
        self._limits = limits or EngineLimits()
        self._decode = decode
        self.metrics: dict[str, float] = {}
        self.capacity: Capacity | None = None
        self.description = ""

    def generate(
        self,
        weights: PyTree,
        prompts: Prompts,
        sampling: SamplingParams,
        key: tuple[int, int],
        *,
        on_tokens: OnTokens | None = None,
    ) -> Rollouts:
        """Draws completions; see `RolloutEngine.generate`.

        ``metrics`` then holds what `Session.metrics` gives at the end.

        Args:
          weights: the policy.
          prompts: prompts and sample ids.
          sampling: how to draw.
          key: (seed, step).
          on_tokens: called with tokens as they are drawn.

        Raises:
          ValueError: an empty prompt, a token outside the vocabulary, sample ids of
            the wrong shape, or a sequence that the pages cannot hold.
        """
        _check_prompts(prompts, sampling, self._policy.vocab_size)
        longest = max(map(len, prompts.tokens))
        with self.session(
            weights,
            key,
            max_length=longest + sampling.max_new_tokens,
            longest_prompt=longest,
            num_prompts=len(prompts.tokens),
            num_sequences=np.size(prompts.sample_ids),
            on_tokens=on_tokens,
        ) as session:
            for tokens, ids in zip(prompts.tokens, prompts.sample_ids, strict=True):
                session.submit(Request(tokens, sampling, tuple(map(int, ids))))
            completions = session.run()
            self.metrics = session.metrics()
        completions.sort(key=lambda c: (c.request, c.sample))
        return _as_rollouts(completions, prompts, sampling.max_new_tokens)

    def session(
        self,
        weights: PyTree,
        key: tuple[int, int],
        *,
        max_length: int,
        longest_prompt: int | None = None,
        num_prompts: int = 64,
        num_sequences: int = 512,
        on_tokens: OnTokens | None = None,
    ) -> "Session":
        """Opens a session that samples from one policy.

        Args:
          weights: as `fp8.weights.sampling_weights` lays them out.
          key: (seed, step) of the sampling noise.
          max_length: tokens of the longest sequence, prompt included.
          longest_prompt: tokens; ``max_length`` if None.
          num_prompts: about so many prompts will come at a time,
          num_sequences: and so many samples of them.
          on_tokens: called with tokens as they are drawn.

        Raises:
          ValueError: the pages do not hold one sequence of ``max_length`` tokens.
        """
        capacity = plan_capacity(
            self._policy,
            self._limits,
            weights,
            max_length=max_length,
            longest_prompt=longest_prompt or max_length,
            num_prompts=num_prompts,
            num_sequences=num_sequences,
        )
        self.capacity, self.description = capacity, str(capacity)
        return Session(
            self._policy,
            self._limits,
            capacity,
            weights,
            key,
            decode=self._decode,
            on_tokens=on_tokens,
        )


class Session:
    """Requests that are sampled from one policy; a context manager.

    Later requests that begin with the tokens of earlier ones, such as the next turn of
    a conversation, share their pages as long as these last.
    """

    def __init__(
        self,
        policy: Policy,
        limits: EngineLimits,
        capacity: Capacity,
        weights: PyTree,
        key: tuple[int, int],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        on_tokens: OnTokens | None = None,
    ):
        self.capacity = capacity
        self._policy = policy
        self._limits = limits
        self._weights = weights
        self._key = tuple(np.uint32(k) for k in key)
        self._stop_strings = StopStrings(decode)
        self._on_tokens = on_tokens
        self._scheduler = Scheduler(
            num_shards=capacity.num_shards,
            num_slots=capacity.num_slots,
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            prefill_rows=capacity.prefill_rows,
            prefill_length=capacity.prefill_length,
            max_length=capacity.max_length,
            min_rows=capacity.min_rows,
            group_size=capacity.group_size,
            share_prefixes=capacity.share_prefixes,
        )
        self._pool = programs.create_pool(
            policy, capacity.num_pages, capacity.page_size
        )
        self._cancelled: list[Completion] = []
        self._seconds = {"prefill": 0.0, "all": 0.0}
        self._used = [0, 0]  # tokens drawn and slot-steps, while sequences waited
        self._most_pages = 0

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Frees the pages."""
        for x in self._pool:
            x.delete()

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to return."""
        return self._scheduler.has_work or bool(self._cancelled)

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id, which its completions bear.

        Raises:
          ValueError: a token outside the vocabulary, stop strings without a tokenizer,
            or a sequence longer than the session's.
        """
        _check_ids(request.prompt, self._policy.vocab_size, "The prompt")
        self._stop_strings.check(request.sampling.stop_strings)
        return self._scheduler.submit(request)

    def cancel(self, request: int) -> None:
        """Ends a request: the next step returns its completions, as they are."""
        events = self._scheduler.cancel(request)
        self._cancelled += [event.sequence.completion() for event in events]

    def set_weights(self, weights: PyTree, key: tuple[int, int]) -> None:
        """Goes on with another policy: nothing that the old one computed is used.

        Sequences that are running keep their tokens.

        Args:
          weights: as before, of the same shapes.
          key: (seed, step) of the sampling noise from now on.
        """
        self._scheduler.forget_prefixes()
        self._weights = weights
        self._key = tuple(np.uint32(k) for k in key)

    def run(
        self,
        on_step: Callable[["Session", list[Completion]], None] | None = None,
    ) -> list[Completion]:
        """Takes steps until all is done; returns the completions as they ended.

        Args:
          on_step: called after every step, with the completions that ended in it.
        """
        completions = []
        while self.has_work:
            ended = self.step()
            completions += ended
            if on_step is not None:
                on_step(self, ended)
        return completions

    def step(self) -> list[Completion]:
        """Prefills some waiting prompts, then decodes a burst.

        Returns:
          The completions that ended.
        """
        start = time.perf_counter()
        self._prefill()
        prefilled = time.perf_counter()
        plan = self._scheduler.next_decode(self._limits.decode_steps)
        completions, self._cancelled = self._cancelled, []
        if plan is not None:
            before, waiting = self._scheduler.metrics, self._scheduler.num_waiting
            for event in self._decode_burst(plan):
                completions += self._take(event)
            if waiting:
                self._note_use(before)
        self._most_pages = max(self._most_pages, self._scheduler.metrics.pages_in_use)
        self._seconds["prefill"] += prefilled - start
        self._seconds["all"] += time.perf_counter() - start
        return completions

    def metrics(self) -> dict[str, float]:
        """What the session has done, for logs.

        `rollout/` and: tokens_per_sec, generated_tokens, prefill_tokens,
        cache_hit_tokens, prefill_share (of the time, as the host sees it), slot_use,
        slot_use_until_queue_empty (1 if nothing ever waited), page_use, preemptions.
        """
        m, capacity = self._scheduler.metrics, self.capacity
        pages = capacity.num_pages * capacity.num_shards
        seconds = self._seconds["all"]
        values = {
            "tokens_per_sec": m.generated_tokens / seconds if seconds else 0.0,
            "generated_tokens": m.generated_tokens,
            "prefill_tokens": m.prefill_tokens,
            "cache_hit_tokens": m.cache_hit_tokens,
            "prefill_share": self._seconds["prefill"] / seconds if seconds else 0.0,
            "slot_use": m.generated_tokens / m.slot_steps if m.slot_steps else 1.0,
            "slot_use_until_queue_empty": (
                self._used[0] / self._used[1] if self._used[1] else 1.0
            ),
            "page_use": self._most_pages / pages,
            "preemptions": m.preemptions,
        }
        return {f"rollout/{name}": float(value) for name, value in values.items()}

    def _note_use(self, before) -> None:
        """Adds a burst, ``before`` which sequences waited, to the use of slots."""
        after = self._scheduler.metrics
        self._used[0] += after.generated_tokens - before.generated_tokens
        self._used[1] += after.slot_steps - before.slot_steps

    def _take(self, event: Event) -> list[Completion]:
        """Passes on what was drawn; returns the completion if it has ended."""
        sequence, tokens, log_probs, reason = event
        drawn = sequence.tokens[sequence.prompt_length :]
        kept = self._stop_strings.end(
            drawn, len(tokens), sequence.sampling.stop_strings
        )
        if kept is not None:
            dropped = len(drawn) - kept
            tokens, log_probs = (x[: len(x) - dropped] for x in (tokens, log_probs))
            reason = FinishReason.STOP
            self._scheduler.finish(sequence, reason, kept)
        if self._on_tokens is not None:
            self._on_tokens(sequence.request_id, sequence.sample, tokens, log_probs)
        return [] if reason is None else [sequence.completion()]

    def _prefill(self) -> None:
        for _ in range(self._limits.prefills_per_burst):
            plan = self._scheduler.next_prefill()
            if plan is None:
                return
            self._pool = programs.prefill(
                self._weights,
                self._pool,
                programs.put(self._policy, _fields(Chunks, plan)),
                policy=self._policy,
            )

    def _copy_pages(self, plan: DecodePlan) -> None:
        shards = self._policy.num_shards
        source, target = (
            x.reshape(shards, -1) for x in (plan.copy_source, plan.copy_target)
        )
        # Of one size, so that there is one program.
        size = self.capacity.page_copies
        for i in range(0, source.shape[1], size):
            some = (x[:, i : i + size] for x in (source, target))
            padded = (
                np.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=-1)
                for x in some
            )
            copies = Copies(*(x.reshape(-1) for x in padded))
            self._pool = programs.copy_pages(
                self._pool, programs.put(self._policy, copies), policy=self._policy
            )

    def _decode_burst(self, plan: DecodePlan) -> list[Event]:
        self._copy_pages(plan)
        rows = _fields(Rows, plan)
        truncated = bool(np.any((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)))
        self._pool, drawn = programs.decode(
            self._weights,
            self._pool,
            programs.put(self._policy, rows),
            self._key,
            num_steps=plan.num_steps,
            truncated=truncated,
            policy=self._policy,
        )
        return self._scheduler.record(plan, *fetch(drawn, self._policy.mesh))


def _check_prompts(prompts: Prompts, sampling: SamplingParams, vocab_size: int) -> None:
    expected = (len(prompts.tokens), sampling.num_samples)
    if np.shape(prompts.sample_ids) != expected:
        raise ValueError(
            f"sample_ids must have shape (prompts, samples) = {expected}, got "
            f"{np.shape(prompts.sample_ids)}."
        )
    if not prompts.tokens:
        raise ValueError("There are no prompts to sample from.")
    for i, tokens in enumerate(prompts.tokens):
        if not len(tokens):
            raise ValueError(f"Prompt {i} is empty: give it at least one token.")
        _check_ids(tokens, vocab_size, f"Prompt {i}")


def _check_ids(tokens: Sequence[int], vocab_size: int, name: str) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"{name} has token ids outside [0, {vocab_size}): is its tokenizer the "
            "model's?"
        )


def _fields(kind, plan):
    """The arrays of a plan that a program takes."""
    return kind(**{name: getattr(plan, name) for name in kind._fields})


def _as_rollouts(
    completions: list[Completion], prompts: Prompts, limit: int
) -> Rollouts:
    tokens = np.zeros((len(completions), limit), np.int32)
    log_probs = np.zeros((len(completions), limit), np.float32)
    for i, c in enumerate(completions):
        tokens[i, : len(c.tokens)] = c.tokens
        log_probs[i, : len(c.log_probs)] = c.log_probs
    return Rollouts(
        tokens,
        log_probs,
        np.array([len(c.tokens) for c in completions], np.int32),
        np.array([c.finish_reason for c in completions], np.int32),
        np.asarray(prompts.sample_ids, np.int32).reshape(-1),
    )
