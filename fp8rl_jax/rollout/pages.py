"""Pages of one device's cache: who holds them, and which token prefixes they hold."""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

_TOKEN_BYTES = np.dtype(np.int32).itemsize


class OutOfPages(RuntimeError):
    """Fewer pages are available than were asked for."""


class Match(NamedTuple):
    """Pages that hold keys and values of the beginning of some tokens.

    Attributes:
      pages: full pages from position 0 on, to be shared.
      partial: a page whose first slots hold all tokens after those, fewer than a page,
        and how many; to be copied. None if there is none or nothing is left.
    """

    pages: list[int]
    partial: tuple[int, int] | None


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """A page in the prefix index: its tokens, below the node of the page before.

    Nodes of fewer tokens than a page are leaves. A page may have several: one for each
    number of its tokens that a sequence had when it was indexed.
    """

    parent: "_Node | None" = None
    key: bytes = b""
    page: int = -1
    children: "dict[bytes, _Node]" = dataclasses.field(default_factory=dict)


class PagePool:
    """Reference counts of a pool of pages and an index of the prefixes in them.

    A page is *held* by sequences, or free, or *reclaimable*: held by nobody, but in the
    index, and so of use to a later sequence with the same prefix. The index is a tree
    of pages by content; what is reclaimed is cut off with everything below it.

    Args:
      num_pages: pages 0 .. num_pages - 1.
      page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self._counts = [0] * num_pages
        self._filled = [False] * num_pages
        self._free = list(range(num_pages))[::-1]
        # The order of an ordered dict is that of use, least recent first.
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        self._root = _Node()
        self._nodes: dict[int, list[_Node]] = {}

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free or reclaimable."""
        return len(self._free) + len(self._reclaimable)

    @property
    def num_held(self) -> int:
        """Pages that some sequence holds."""
        return len(self._counts) - self.num_available

    def num_reclaimable(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` would no longer be available if they were shared."""
        return sum(page in self._reclaimable for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages: free ones first, then the least recently used.

        Raises:
          OutOfPages: fewer are available; none is taken.
        """
        if count > self.num_available:
            raise OutOfPages(
                f"{count} pages were asked for and {self.num_available} of "
                f"{len(self._counts)} are available."
            )
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if not self._free:
            self._forget(next(iter(self._reclaimable)))
        page = self._free.pop()
        self._counts[page] = 1
        self._filled[page] = False
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more holder of each page.

        Raises:
          ValueError: a page is free; none is shared.
        """
        pages = list(pages)
        for page in pages:
            if not self._counts[page] and page not in self._reclaimable:
                raise ValueError(f"Page {page} is free: there is nothing to share.")
        for page in pages:
            self._reclaimable.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Counts one holder less of each page.

        A page without any is reclaimable if it is in the index and filled, else free.
        Pages count as used from last to first, so that the end of a sequence is
        reclaimed before its beginning, which more sequences may share.

        Raises:
          ValueError: a page is held fewer times than that; none is released.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            if self._counts[page] < times:
                raise ValueError(
                    f"Page {page} is held {self._counts[page]} times, not {times}."
                )
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page]:
                continue
            if page not in self._nodes:
                self._free.append(page)
                continue
            self._reclaimable[page] = None
            if not self._filled[page]:  # nobody is left to fill it
                self._forget(page)

    def mark_filled(self, page: int) -> None:
        """Says that the program which fills a held page has been issued."""
        self._filled[page] = True

    def is_filled(self, page: int) -> bool:
        """Whether a program issued later may read the page's indexed tokens."""
        return self._filled[page]

    def match(self, tokens: Int[np.ndarray, "T"]) -> Match:
        """The longest indexed beginning of ``tokens``, filled or still to be filled."""
        node, pages = self._root, []
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            if len(key) < _TOKEN_BYTES * self._page_size:
                return Match(pages, (child.page, len(key) // _TOKEN_BYTES))
            pages.append(child.page)
            node = child
        return Match(pages, None)

    def index(self, tokens: Int[np.ndarray, "T"], pages: list[int]) -> None:
        """Says that ``pages`` hold, or are to hold, keys and values of ``tokens``.

        Where the index knows another page with the same prefix, that one stays.

        Args:
          tokens: of a sequence, from its first on.
          pages: those of the sequence, held; there may be more of them.
        """
        node = self._root
        for key, page in zip(self._keys(tokens), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, page)
                self._nodes.setdefault(page, []).append(child)
            node = child

    def clear(self) -> None:
        """Forgets all prefixes. Pages that are held stay so."""
        self._root = _Node()
        self._nodes.clear()
        self._free.extend(self._reclaimable)
        self._reclaimable.clear()

    def _keys(self, tokens):
        """The bytes of each page of tokens, the last perhaps shorter."""
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        stride = _TOKEN_BYTES * self._page_size
        return [data[i : i + stride] for i in range(0, len(data), stride)]

    def _forget(self, page: int) -> None:
        """Cuts a page out of the index, with all below it."""
        stack = list(self._nodes[page])
        for node in stack:
            del node.parent.children[node.key]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            nodes = self._nodes[node.page]
            nodes.remove(node)
            if nodes:
                continue
            del self._nodes[node.page]
            if node.page in self._reclaimable:
                del self._reclaimable[node.page]
                self._free.append(node.page)
