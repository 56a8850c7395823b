"""The running sequences as arrays, so that a plan is a few gathers."""

import numpy as np
from jaxtyping import Int

from fp8rl_jax.rollout.sequence import Sequence

# What a slot without a sequence holds.
_IDLE = {
    "tokens": (np.int32, 0),
    "positions": (np.int32, -1),
    "limits": (np.int32, -1),
    "sample_ids": (np.int32, 0),
    "temperature": (np.float32, 1.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
}


class Slots:
    """What decoding needs to know of each running sequence.

    Every array has one more entry than there are slots, which stays empty: slot -1, for
    idle rows.

    Args:
      num_slots: of all shards.
      table_width: entries of a page table's row.

    Attributes:
      sequences: object [num_slots + 1], the `Sequence` in each slot or None.
      ready: bool [num_slots + 1], whether it can decode.
      num_pages: int32 [num_slots + 1], pages that it holds.
      page_table: int32 [num_slots + 1, W].
    """

    def __init__(self, num_slots: int, table_width: int):
        size = num_slots + 1
        self.sequences = np.full(size, None, object)
        self.ready = np.zeros(size, bool)
        self.num_pages = np.zeros(size, np.int32)
        self.page_table = np.full((size, table_width), -1, np.int32)
        self._stop_ids = np.full((size, 1), -1, np.int32)
        self._rows = {
            name: np.full(size, value, dtype) for name, (dtype, value) in _IDLE.items()
        }

    def enter(self, sequence: Sequence) -> None:
        """Puts a sequence into the slot of its placement, not yet ready."""
        slot, sampling = sequence.placement.slot, sequence.sampling
        self.sequences[slot] = sequence
        row = {
            "tokens": sequence.tokens[-1],
            "positions": sequence.length - 1,
            "limits": sequence.max_length - 1,
            "sample_ids": sequence.sample_id,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
        for name, value in row.items():
            self._rows[name][slot] = value
        self._enter_stop_ids(slot, sampling.stop_ids)
        self.update_pages(sequence)

    def _enter_stop_ids(self, slot, stop_ids):
        missing = power_of_two(len(stop_ids)) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(
                self._stop_ids, ((0, 0), (0, missing)), constant_values=-1
            )
        self._stop_ids[slot, : len(stop_ids)] = stop_ids

    def leave(self, slot: int) -> None:
        """Empties a slot."""
        # `enter` writes all of the other arrays.
        for array in (self.sequences, self.ready, self.page_table, self._stop_ids):
            array[slot] = array[-1]

    def update_pages(self, sequence: Sequence) -> None:
        """Notes the pages that a sequence holds now."""
        slot, pages = sequence.placement.slot, sequence.placement.pages
        self.num_pages[slot] = len(pages)
        self.page_table[slot, : len(pages)] = pages

    def pages_to_decode(self, num_steps: int, page_size: int) -> Int[np.ndarray, "_"]:
        """Pages that each slot must hold for its next ``num_steps`` steps."""
        first, limit = self._rows["positions"], self._rows["limits"]
        return (first + np.minimum(num_steps, limit - first) - 1) // page_size + 1

    def by_length(self, begin: int, end: int) -> Int[np.ndarray, "_"]:
        """The ready slots of begin .. end - 1, longest sequence first."""
        slots = begin + np.flatnonzero(self.ready[begin:end])
        return slots[np.argsort(-self._rows["positions"][slots], kind="stable")]

    def advance(self, slots, tokens, counts) -> Int[np.ndarray, "_"]:
        """Notes that ``counts`` tokens were drawn, the last of which is in ``tokens``.

        Returns:
          Whether each sequence has reached its limit.
        """
        self._rows["tokens"][slots] = tokens
        self._rows["positions"][slots] += counts
        return self._rows["positions"][slots] >= self._rows["limits"][slots]

    def gather(self, slots: Int[np.ndarray, "R"]) -> dict[str, np.ndarray]:
        """The rows of a decode plan for these slots; -1: idle."""
        rows = {name: array[slots] for name, array in self._rows.items()}
        return rows | {
            "stop_ids": self._stop_ids[slots],
            "page_table": self.page_table[slots],
            "slots": slots,
            "sequences": self.sequences[slots],
        }


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()
