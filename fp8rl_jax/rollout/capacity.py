"""How much a rollout engine holds: slots, pages and the shapes of its programs."""

import dataclasses

import jax
from jaxtyping import PyTree

from fp8rl_jax.attention import SharedPrefix, page_size
from fp8rl_jax.parallel.processes import exchange
from fp8rl_jax.rollout.programs import Policy, page_bytes
from fp8rl_jax.rollout.slots import power_of_two

# Rows of the smallest decode program: of a kernel's tile, or of little work.
_MIN_ROWS = {"gpu": 64, "cpu": 8}
_LONGEST_CHUNK = 512  # tokens: a longer prompt takes several
_GROUP_SIZE = 16  # the usual samples of a prompt
# Pages that are copied at a time lie beside the pool until all have been read.
_COPIED_BYTES, _MOST_COPIES = 2**29, 1024


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What an engine may use.

    Attributes:
      max_slots: most sequences that one device decodes at once.
      max_length: tokens of the longest sequence, prompt included; None: of the longest
        that a call may need. Giving it keeps programs the same from call to call.
      decode_steps: most decode steps between two looks at the queue.
      prefill_tokens: most tokens of one prefill, per device.
      prefills_per_burst: most prefills between two bursts of decode steps.
      memory_fraction: share of a device's free memory that pages may take.
      num_pages: pages per device; None: what is needed, as far as memory goes.
      share_prefixes: whether decode steps read pages that several sequences share once
        for all of them, which changes their speed alone; None: where it pays.
    """

    max_slots: int = 1024
    max_length: int | None = None
    decode_steps: int = 16
    prefill_tokens: int = 8192
    prefills_per_burst: int = 8
    memory_fraction: float = 0.9
    num_pages: int | None = None
    share_prefixes: bool | None = None

    def __post_init__(self):
        optional = ("max_length", "num_pages")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "share_prefixes":
                continue
            if field.name in optional and value is None:
                continue
            if not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value}.")
        if self.memory_fraction > 1:
            raise ValueError(
                f"memory_fraction must be at most 1, got {self.memory_fraction}."
            )


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What one session has; per device unless it says otherwise.

    Attributes:
      num_shards: devices that sequences are split over.
      page_size: tokens of a page.
      num_pages: pages.
      num_slots: most sequences decoded at once.
      min_rows: rows of the smallest decode program.
      max_length: tokens of the longest sequence.
      prefill_rows: chunks of a prefill.
      prefill_length: tokens of a chunk.
      page_copies: pages copied by one program.
      bytes_per_page: in all layers.
      group_size: most sequences that share pages at a time.
      share_prefixes: as in `EngineLimits`; never None where no kernel could gain by it.
    """

    num_shards: int
    page_size: int
    num_pages: int
    num_slots: int
    min_rows: int
    max_length: int
    prefill_rows: int
    prefill_length: int
    page_copies: int
    bytes_per_page: int
    group_size: int
    share_prefixes: bool | None

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages of all devices hold."""
        return self.num_pages * self.page_size * self.num_shards

    @property
    def resident(self) -> int:
        """Sequences of the greatest length that all devices hold at once."""
        pages_of_a_sequence = -(-self.max_length // self.page_size)
        return self.num_shards * min(
            self.num_slots, self.num_pages // pages_of_a_sequence
        )

    def __str__(self) -> str:
        size = self.num_pages * self.bytes_per_page / 1e9
        return (
            f"KV cache: {self.num_tokens:,} tokens in {self.num_pages:,} pages of "
            f"{self.page_size} on each device ({size:.1f} GB); "
            f"{self.num_slots * self.num_shards:,} slots, "
            f"{self.resident:,} sequences of {self.max_length:,} tokens "
            "at once."
        )


def plan_capacity(
    policy: Policy,
    limits: EngineLimits,
    weights: PyTree,
    *,
    max_length: int,
    longest_prompt: int,
    num_prompts: int,
    num_sequences: int,
) -> Capacity:
    """Sizes a session on the devices that hold the weights.

    Args:
      policy: what is sampled from.
      limits: what it may use.
      weights: of the policy; its devices' free memory is what pages can take.
      max_length: tokens of the longest sequence, unless ``limits`` names it.
      longest_prompt: tokens.
      num_prompts: how many there are at a time.
      num_sequences: how many of their samples.

    Raises:
      ValueError: the pages do not hold one sequence of that length.
    """
    devices = jax.tree.leaves(weights)[0].devices()
    return size_session(
        policy,
        limits,
        _free_bytes(devices),
        next(iter(devices)).platform,
        max_length=max_length,
        longest_prompt=longest_prompt,
        num_prompts=num_prompts,
        num_sequences=num_sequences,
    )


def size_session(
    policy: Policy,
    limits: EngineLimits,
    free_bytes: int | None,
    platform: str,
    *,
    max_length: int,
    longest_prompt: int,
    num_prompts: int,
    num_sequences: int,
) -> Capacity:
    """The arithmetic of :func:`plan_capacity`, for devices that need not be there.

    Args:
      policy: as there.
      limits: as there.
      free_bytes: of the fullest device beside the weights; None: not known.
      platform: of the devices, "gpu" for those with kernels.
      max_length: as there, and so are the rest.
      longest_prompt: tokens.
      num_prompts: how many there are at a time.
      num_sequences: how many of their samples.

    Raises:
      ValueError: the pages do not hold one sequence of that length.
    """
    shards = policy.num_shards
    heads = policy.config.num_heads // policy.config.num_kv_heads
    max_length = limits.max_length or max_length
    page = page_size(max_length, platform)
    per_page = page_bytes(policy.config, policy.precision, page)
    pages_of_a_sequence = -(-max_length // page)
    slots = min(limits.max_slots, -(-num_sequences // shards))
    num_pages = limits.num_pages
    if num_pages is None:
        # Admission leaves a page over for every running sequence.
        num_pages = slots * (pages_of_a_sequence + 1)
        if free_bytes is not None:
            room = int(limits.memory_fraction * free_bytes) // per_page
            num_pages = min(num_pages, room)
    if num_pages < pages_of_a_sequence:
        raise ValueError(
            f"{num_pages} pages of {page} tokens ({per_page / 1e6:.1f} MB each) do not "
            f"hold one sequence of {max_length} tokens: shorten prompts or "
            "max_new_tokens, free device memory, or use more devices."
        )
    longest = max(-(-longest_prompt // page), 1) * page
    chunk = min(power_of_two(longest // page) * page, max(_LONGEST_CHUNK, page))
    rows = min(limits.prefill_tokens // chunk, power_of_two(-(-num_prompts // shards)))
    return Capacity(
        num_shards=shards,
        page_size=page,
        num_pages=num_pages,
        num_slots=slots,
        min_rows=min(_MIN_ROWS.get(platform, 8), power_of_two(slots)),
        max_length=max_length,
        prefill_rows=max(rows, 1),
        prefill_length=chunk,
        page_copies=max(min(_COPIED_BYTES // per_page, _MOST_COPIES, slots), 1),
        bytes_per_page=per_page,
        group_size=min(_GROUP_SIZE, SharedPrefix.max_members(heads)),
        share_prefixes=_share_prefixes(limits, platform),
    )


def _share_prefixes(limits, platform) -> bool | None:
    if limits.share_prefixes is None and platform != "gpu":
        return False  # one program instead of two of the same speed
    return limits.share_prefixes


def _free_bytes(devices) -> int | None:
    """Of the fullest device of all processes; None where a platform does not say."""
    here = jax.process_index()
    stats = [d.memory_stats() for d in devices if d.process_index == here]
    free = None
    if all(stats):
        free = min(int(s["bytes_limit"] - s["bytes_in_use"]) for s in stats)
    everywhere = exchange(free)  # Schedulers must not differ.
    return None if None in everywhere else min(everywhere)
