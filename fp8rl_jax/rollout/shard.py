"""The sequences that run on one device, and the pages that they hold."""

import bisect

from fp8rl_jax.rollout.pages import Match, PagePool
from fp8rl_jax.rollout.sequence import Placement, Sequence


class Shard:
    """Admits sequences, finds what they must compute and takes their pages back.

    A sequence takes the pages of its prefix that the index knows, and fills the others
    itself. It is ready once all are filled. Should a sequence go that was to fill a
    page which others share, the first of those fills it.

    Args:
      slots: its slots.
      num_pages: pages of its pool.
      page_size: tokens of a page.
    """

    def __init__(self, slots: range, num_pages: int, page_size: int):
        self.slots = slots
        self.pool = PagePool(num_pages, page_size)
        self._page_size = page_size
        self._free_slots = list(slots)[::-1]
        self._running: list[Sequence] = []  # by arrival, like the next
        self._unready: list[Sequence] = []
        self._fillers: dict[int, Sequence] = {}

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot, by arrival."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """How many sequences have a slot."""
        return len(self._running)

    @property
    def youngest(self) -> Sequence:
        """The running sequence that arrived last."""
        return self._running[-1]

    def reserve(self, sequence: Sequence) -> Match | None:
        """What an admitted ``sequence`` would share; None if there is no room.

        There is room if a page for every running sequence would be left over, so that
        admission does not take what those need next.
        """
        if not self._free_slots:
            return None
        spare = self.pool.num_available - self.num_running
        total = self._pages_of(sequence.length)
        match = self.pool.match(sequence.cached_tokens)
        new = total - len(match.pages) + self.pool.num_reclaimable(match.pages)
        if match.partial is None:
            return match if new <= spare else None
        # The source of a copy must stay until the copy has been made.
        source = self.pool.num_reclaimable(match.partial[:1])
        if new + source <= spare:
            return match
        return Match(match.pages, None) if new <= spare else None

    def admit(self, sequence: Sequence, match: Match) -> int:
        """Gives ``sequence`` a slot and pages; ``match`` is what it shares.

        Returns:
          How many of its tokens need not be computed.
        """
        self.pool.share(match.pages)
        source, num_copied = match.partial or (None, 0)
        if source is not None:
            self.pool.share([source])
        own = self.pool.allocate(self._pages_of(sequence.length) - len(match.pages))
        pages = match.pages + own
        sequence.placement = Placement(
            self._free_slots.pop(), pages, copy_source=source
        )
        if source is None:
            tokens = sequence.cached_tokens
            self.pool.index(tokens, pages)
            for page in pages[len(match.pages) : self._pages_of(len(tokens))]:
                self._fillers[page] = sequence
        for group in (self._running, self._unready):
            bisect.insort(group, sequence, key=lambda s: s.order)
        return len(match.pages) * self._page_size + num_copied

    def next_chunks(self, rows: int, num_pages: int) -> list[tuple[Sequence, range]]:
        """The pages to fill next, oldest sequence first, and takes them as filled.

        Args:
          rows: at most so many sequences.
          num_pages: at most so many pages of each.

        Returns:
          Sequences and which of their pages.
        """
        chunks = []
        for sequence in self._unready:
            if len(chunks) == rows:
                break
            chunk = self._next_chunk(sequence, num_pages)
            if chunk:
                chunks.append((sequence, chunk))
        # Not before: rows of one program cannot read each other's pages.
        for sequence, chunk in chunks:
            for page in sequence.placement.pages[chunk.start : chunk.stop]:
                self.pool.mark_filled(page)
                self._fillers.pop(page, None)
        return chunks

    def _next_chunk(self, sequence, num_pages) -> range:
        """Pages that ``sequence`` can fill now; none while it waits for others."""
        at = sequence.placement
        if self._lost(at.copy_source):
            self.pool.release([at.copy_source])
            at.copy_source = None
        begin, end = self._to_fill(sequence)
        end = min(end, begin + num_pages)
        for i in range(begin, end):
            page = at.pages[i]
            if (
                self.pool.is_filled(page)
                or self._fillers.setdefault(page, sequence) is not sequence
            ):
                return range(begin, i)
        return range(begin, end)

    def _lost(self, source: int | None) -> bool:
        """Whether nobody will fill this page any more."""
        return not (
            source is None or self.pool.is_filled(source) or source in self._fillers
        )

    def _to_fill(self, sequence) -> tuple[int, int]:
        """The first page that is not filled, and the end of those to be filled."""
        at = sequence.placement
        end = self._pages_of(sequence.length - 1) - (at.copy_source is not None)
        while at.num_filled < end and self.pool.is_filled(at.pages[at.num_filled]):
            at.num_filled += 1
        return at.num_filled, end

    def promote(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Sequences that have become ready, and the copies to make before they decode.

        Returns:
          The sequences, and (source, target) pages.
        """
        ready = [sequence for sequence in self._unready if self._is_filled(sequence)]
        copies = []
        for sequence in ready:
            self._unready.remove(sequence)
            at = sequence.placement
            if at.copy_source is not None:
                target = at.pages[self._pages_of(sequence.length - 1) - 1]
                copies.append((at.copy_source, target))
                self.pool.release([at.copy_source])
                at.copy_source = None
        return ready, copies

    def _is_filled(self, sequence) -> bool:
        source = sequence.placement.copy_source
        begin, end = self._to_fill(sequence)
        return begin == end and (source is None or self.pool.is_filled(source))

    def grow(self, sequence: Sequence, num_pages: int) -> bool:
        """Gives ``sequence`` pages until it has ``num_pages``; False if they lack."""
        pages = sequence.placement.pages
        missing = num_pages - len(pages)
        if missing > self.pool.num_available:
            return False
        pages.extend(self.pool.allocate(missing))
        return True

    def remove(self, sequence: Sequence) -> None:
        """Takes slot and pages of ``sequence``; what they hold stays in the index."""
        at, pages = sequence.placement, sequence.placement.pages
        sequence.placement = None
        self._running.remove(sequence)
        self._free_slots.append(at.slot)
        if sequence in self._unready:
            self._unready.remove(sequence)
            for page in pages:
                if self._fillers.get(page) is sequence:
                    del self._fillers[page]
        else:
            tokens = sequence.cached_tokens
            for page in pages[: self._pages_of(len(tokens))]:
                self.pool.mark_filled(page)
            self.pool.index(tokens, pages)
        if at.copy_source is not None:
            self.pool.release([at.copy_source])
        self.pool.release(pages)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
