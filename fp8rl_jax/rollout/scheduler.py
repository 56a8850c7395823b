"""Continuous batching: which sequence runs where, and what the device does next."""

import dataclasses
import heapq

import numpy as np
from jaxtyping import Bool, Float, Int

from fp8rl_jax.rollout.plans import DecodePlan, PrefillPlan, SharedPages
from fp8rl_jax.rollout.sequence import Event, Sequence
from fp8rl_jax.rollout.shard import Shard
from fp8rl_jax.rollout.sharing import find_shared_pages
from fp8rl_jax.rollout.slots import Slots, power_of_two
from fp8rl_jax.rollout.types import FinishReason, Request


@dataclasses.dataclass
class Metrics:
    """Totals since the start.

    Attributes:
      generated_tokens: tokens drawn, each by one slot in one step.
      slot_steps: slots times steps: so many could have been drawn.
      row_steps: rows of the decode programs times steps: so many were computed.
      prefill_tokens: tokens stored by prefill.
      cache_hit_tokens: tokens that admitted sequences shared or copied instead.
      preemptions: sequences that lost their pages and had to wait.
      pages_in_use: pages held now, over all shards.
    """

    generated_tokens: int = 0
    slot_steps: int = 0
    row_steps: int = 0
    prefill_tokens: int = 0
    cache_hit_tokens: int = 0
    preemptions: int = 0
    pages_in_use: int = 0


class Scheduler:
    """Decides which sequence runs on which shard, and plans the device's programs.

    Per round: `next_prefill` until it returns None, `next_decode`, run, `record`.
    Prefill and decode may be interleaved otherwise, too, as long as the device runs
    plans in the order in which they were given. The same calls give the same plans.

    Sequences wait in order of arrival, and none overtakes another. The first goes to a
    shard with room: by preference to one that runs fewer than 1 / num_shards of all
    unfinished sequences, among those to the one that knows the longest beginning of it,
    then to the one with most pages available. So the samples of a prompt share pages
    unless other shards would idle.

    If a shard runs out of pages, its youngest sequence goes back to its place in the
    queue, with all tokens drawn so far.

    Args:
      num_shards: devices with a pool of pages each.
      num_slots: sequences that run at once, per shard.
      num_pages: pages per shard.
      page_size: tokens of a page.
      prefill_rows: chunks of a prefill program, per shard.
      prefill_length: tokens of a chunk, a multiple of the page size.
      max_length: tokens of the longest sequence.
      min_rows: rows of the smallest decode program, per shard.
      group_size: most rows of a decode plan that share pages at a time.
      share_prefixes: whether decode plans name pages that several rows share; None:
        where it pays.

    Raises:
      ValueError: a size is not positive, or ``prefill_length`` no multiple of a page.
    """

    def __init__(
        self,
        num_shards: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        prefill_rows: int,
        prefill_length: int,
        max_length: int,
        min_rows: int = 1,
        group_size: int = 16,
        share_prefixes: bool | None = None,
    ):
        sizes = {
            name: size
            for name, size in locals().items()
            if name not in ("self", "share_prefixes")
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}.")
        if prefill_length % page_size:
            raise ValueError(
                f"prefill_length={prefill_length} must be a multiple of "
                f"page_size={page_size}."
            )
        self._num_slots = num_slots
        self._num_pages = num_pages
        self._page_size = page_size
        self._prefill_rows = prefill_rows
        self._prefill_length = prefill_length
        self._max_length = max_length
        self._group_size = group_size
        self._share_prefixes = share_prefixes
        self._row_buckets = _buckets(min_rows, num_slots)
        self._table_width = power_of_two(self._pages_of(max_length))
        self._shards = [
            Shard(range(i * num_slots, (i + 1) * num_slots), num_pages, page_size)
            for i in range(num_shards)
        ]
        self._slots = Slots(num_shards * num_slots, self._table_width)
        self._waiting: list[tuple[int, Sequence]] = []  # a heap by arrival
        self._unfinished: dict[int, list[Sequence]] = {}
        self._num_requests = self._num_sequences = 0
        self._burst: DecodePlan | None = None
        self._metrics = Metrics()

    @property
    def has_work(self) -> bool:
        """Whether some sequence has not ended."""
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def metrics(self) -> Metrics:
        """A copy of the totals so far."""
        pages = sum(shard.pool.num_held for shard in self._shards)
        return dataclasses.replace(self._metrics, pages_in_use=pages)

    def submit(self, request: Request) -> int:
        """Queues one sequence per sample id.

        Returns:
          The request's id.

        Raises:
          ValueError: a sequence could become longer than `max_length`, or than one
            shard has pages for.
        """
        prompt, new = len(request.prompt), request.sampling.max_new_tokens
        length = prompt + new
        if length > self._max_length:
            raise ValueError(
                f"A prompt of {prompt} tokens and max_new_tokens={new} exceed "
                f"max_length={self._max_length}: shorten one or raise max_length."
            )
        if self._pages_of(length) > self._num_pages:
            raise ValueError(
                f"A prompt of {prompt} tokens and max_new_tokens={new} need "
                f"{self._pages_of(length)} pages of {self._page_size} tokens, and a "
                f"device has {self._num_pages}: shorten one or give the cache more "
                "memory."
            )
        request_id = self._num_requests
        self._num_requests += 1
        self._unfinished[request_id] = []
        for sample in range(len(request.sample_ids)):
            sequence = Sequence(request, request_id, sample, self._num_sequences)
            self._num_sequences += 1
            self._unfinished[request_id].append(sequence)
            heapq.heappush(self._waiting, (sequence.order, sequence))
        return request_id

    def cancel(self, request_id: int) -> list[Event]:
        """Ends the sequences of a request that have not ended, with what they have.

        Tokens of a burst that is running now are dropped.

        Returns:
          An event for each of them; none if the request is unknown or done.
        """
        events = []
        for sequence in list(self._unfinished.get(request_id, ())):
            self._end(sequence, FinishReason.CANCELLED)
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            events.append(Event(sequence, *nothing, FinishReason.CANCELLED))
        return events

    def finish(self, sequence: Sequence, reason: FinishReason, num_tokens: int) -> None:
        """Cuts a completion to its first ``num_tokens``, and ends it if it has not.

        Raises:
          ValueError: it has fewer tokens.
        """
        sequence.cut(num_tokens)
        if sequence.finish_reason is None:
            self._end(sequence, reason)
        sequence.finish_reason = reason

    def forget_prefixes(self) -> None:
        """Computes everything anew, because the weights have changed.

        Running sequences keep their tokens and wait for their keys and values.

        Raises:
          RuntimeError: a burst has not been recorded.
        """
        self._check_recorded()
        for shard in self._shards:
            for sequence in shard.running:
                self._stop(sequence)
            shard.pool.clear()

    def next_prefill(self) -> PrefillPlan | None:
        """Admits waiting sequences and plans what they must compute.

        Returns:
          At most ``prefill_rows`` chunks a shard and one a sequence; None if there is
          nothing to compute.
        """
        while self._waiting and self._admit(self._waiting[0][1]):
            heapq.heappop(self._waiting)
        num_pages = self._prefill_length // self._page_size
        chunks = [
            shard.next_chunks(self._prefill_rows, num_pages) for shard in self._shards
        ]
        if not any(chunks):
            return None
        rows = len(chunks) * self._prefill_rows
        tokens = np.zeros((rows, self._prefill_length), np.int32)
        start = np.full(rows, -1, np.int32)
        table = np.full((rows, self._table_width), -1, np.int32)
        for i, of_shard in enumerate(chunks):
            for row, (sequence, pages) in enumerate(of_shard, i * self._prefill_rows):
                start[row] = pages.start * self._page_size
                end = pages.stop * self._page_size
                part = sequence.cached_tokens[start[row] : end]
                tokens[row, : len(part)] = part
                table[row, : pages.stop] = sequence.placement.pages[: pages.stop]
                self._metrics.prefill_tokens += len(part)
        return PrefillPlan(tokens, start, table)

    def _admit(self, sequence: Sequence) -> bool:
        """Starts ``sequence`` on the shard that suits it best, if any has room."""
        running = sum(shard.num_running for shard in self._shards)
        fair = -(-(running + len(self._waiting)) // len(self._shards))
        best = best_rank = None
        for shard in self._shards:
            match = shard.reserve(sequence)
            if match is None:
                continue
            rank = (
                shard.num_running < fair,
                len(match.pages) * self._page_size + (match.partial or (0, 0))[1],
                shard.pool.num_available,
                -shard.num_running,
            )
            if best is None or rank > best_rank:
                best, best_rank = (shard, match), rank
        if best is None:
            return False
        shard, match = best
        self._metrics.cache_hit_tokens += shard.admit(sequence, match)
        self._slots.enter(sequence)
        return True

    def next_decode(self, num_steps: int) -> DecodePlan | None:
        """Plans a burst of ``num_steps`` steps of every sequence that is ready.

        If only copies are left to make, all rows are idle.

        Returns:
          The plan, to be given to `record`; None if no sequence is ready.

        Raises:
          RuntimeError: the last burst has not been recorded.
        """
        self._check_recorded()
        copies = []
        for shard in self._shards:
            ready, pairs = shard.promote()
            copies.append(pairs)
            self._slots.ready[[sequence.placement.slot for sequence in ready]] = True
        self._grow(num_steps)
        if not self._slots.ready.any() and not any(copies):
            return None
        source, target = _pad_copies(copies)
        rows = self._slots.gather(self._rows())
        self._burst = DecodePlan(
            num_steps=num_steps,
            shared=self._shared_pages(rows["page_table"], rows["positions"]),
            copy_source=source,
            copy_target=target,
            **rows,
        )
        return self._burst

    def _shared_pages(self, page_table, positions) -> SharedPages | None:
        if self._share_prefixes is False:
            return None
        return find_shared_pages(
            page_table,
            positions,
            num_shards=len(self._shards),
            page_size=self._page_size,
            group_size=self._group_size,
            always=bool(self._share_prefixes),
        )

    def _grow(self, num_steps: int) -> None:
        """Gives ready sequences the pages of a burst.

        The youngest go until the pages suffice for the others; these are the same in
        whatever order pages are given.
        """
        slots = self._slots
        needed = slots.pages_to_decode(num_steps, self._page_size)
        growing = np.flatnonzero(slots.ready & (needed > slots.num_pages))
        for slot in growing.tolist():
            sequence = slots.sequences[slot]
            shard = self._shards[slot // self._num_slots]
            while sequence is not None and not shard.grow(sequence, int(needed[slot])):
                self._stop(shard.youngest)
                self._metrics.preemptions += 1
                sequence = slots.sequences[slot]
            if sequence is not None:
                slots.update_pages(sequence)

    def _rows(self) -> Int[np.ndarray, "R"]:
        """The slot of each row of a decode plan; -1: idle."""
        slots = [
            self._slots.by_length(shard.slots.start, shard.slots.stop)
            for shard in self._shards
        ]
        most = max(map(len, slots))
        rows = next(size for size in self._row_buckets if size >= most)
        out = np.full((len(slots), rows), -1, np.int32)
        for row, of_shard in zip(out, slots, strict=True):
            row[: len(of_shard)] = of_shard
        return out.reshape(-1)

    def record(
        self,
        plan: DecodePlan,
        tokens: Int[np.ndarray, "R num_steps"],
        log_probs: Float[np.ndarray, "R num_steps"],
        counts: Int[np.ndarray, "R"],
        stopped: Bool[np.ndarray, "R"],
    ) -> list[Event]:
        """Appends what a burst has drawn, and ends sequences that are complete.

        Args:
          plan: the last one that `next_decode` gave.
          tokens: int32 [R, num_steps].
          log_probs: float32 [R, num_steps].
          counts: int32 [R], how many of them were drawn.
          stopped: bool [R], whether the last one is a stop token.

        Returns:
          An event for each row that drew tokens and was not cancelled meanwhile.

        Raises:
          RuntimeError: ``plan`` is another one.
        """
        if plan is not self._burst:
            raise RuntimeError("record() takes the plan that next_decode() gave last.")
        self._burst = None
        steps = int(counts.max(initial=0))
        self._metrics.row_steps += steps * len(plan.slots)
        self._metrics.slot_steps += steps * len(self._shards) * self._num_slots
        # A sequence that was cancelled meanwhile has left its slot.
        same = self._slots.sequences[plan.slots] == plan.sequences
        rows = np.flatnonzero(same & (plan.slots >= 0) & (counts > 0))
        counts = counts[rows]
        full = self._slots.advance(plan.slots[rows], tokens[rows, counts - 1], counts)
        self._metrics.generated_tokens += int(counts.sum())
        reasons = np.where(full, FinishReason.LENGTH, -1)
        reasons = np.where(stopped[rows], FinishReason.STOP, reasons)
        events = []
        for row, count, reason in zip(
            rows.tolist(), counts.tolist(), reasons.tolist(), strict=True
        ):
            sequence = plan.sequences[row]
            drawn = tokens[row, :count], log_probs[row, :count]
            sequence.extend(*drawn)
            reason = None if reason < 0 else FinishReason(reason)
            if reason is not None:
                self._end(sequence, reason)
            events.append(Event(sequence, *drawn, reason))
        return events

    def _check_recorded(self):
        if self._burst is not None:
            raise RuntimeError("The last burst has not been recorded: call record().")

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Takes a sequence out of everything."""
        sequence.finish_reason = reason
        if sequence.placement is None:
            self._waiting.remove((sequence.order, sequence))
            heapq.heapify(self._waiting)
        else:
            self._leave(sequence)
        others = self._unfinished[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._unfinished[sequence.request_id]

    def _stop(self, sequence: Sequence) -> None:
        """Sends a running sequence back to its place in the queue."""
        self._leave(sequence)
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _leave(self, sequence: Sequence) -> None:
        slot = sequence.placement.slot
        self._shards[slot // self._num_slots].remove(sequence)
        self._slots.leave(slot)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


def _buckets(smallest: int, largest: int) -> list[int]:
    """Powers of two from ``smallest`` on, below ``largest``, and ``largest``."""
    sizes, size = [], power_of_two(smallest)
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def _pad_copies(copies: list[list[tuple[int, int]]]):
    """Sources and targets, padded with -1 to as many for each shard."""
    most = max(map(len, copies))
    out = np.full((2, len(copies), power_of_two(most) if most else 0), -1, np.int32)
    for i, pairs in enumerate(copies):
        for j, pair in enumerate(pairs):
            out[:, i, j] = pair
    return out.reshape(2, -1)
