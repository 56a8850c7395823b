"""Which sequence owns which page: allocation and sharing, on the host."""

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for."""


class PagePool:
    """Reference counts of a pool of pages.

    Args:
      num_pages: pages 0 .. num_pages - 1.
    """

    def __init__(self, num_pages: int):
        self._counts = [0] * num_pages
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages, lowest first.

        Raises:
          OutOfPages: there are fewer; none is taken.
        """
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages were asked for and {len(self._free)} of "
                f"{len(self._counts)} are free."
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more holder of each page.

        Raises:
          ValueError: a page is free.
        """
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Counts one holder less; a page without any is free again.

        Raises:
          ValueError: a page is free already.
        """
        pages = list(pages)
        self._check_held(pages)
        for page in pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)

    def _check_held(self, pages):
        for page in set(pages):
            if self._counts[page] < pages.count(page):
                raise ValueError(
                    f"Page {page} is held {self._counts[page]} times, not "
                    f"{pages.count(page)}."
                )

    def fork(
        self, pages: list[int], length: int, page_size: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Pages for another sequence that begins with the same ``length`` tokens.

        Full pages are shared. A partly filled last one is copied, since both sequences
        will write to it.

        Args:
          pages: of the first sequence.
          length: tokens that both have.
          page_size: tokens of a page.

        Returns:
          The pages of the other sequence, and (source, target) of the copy if there is
          one to make.

        Raises:
          OutOfPages: there is no page for the copy; nothing is shared.
        """
        full, partial = divmod(length, page_size)
        own = self.allocate(1 if partial else 0)
        self.share(pages[:full])
        return pages[:full] + own, [(pages[full], page) for page in own]
