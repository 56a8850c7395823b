"""Where a completion ends because its text says so."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

# Tokens that a character of a stop string may take, at most: bytes of UTF-8.
_TOKENS_PER_CHARACTER = 4


class StopStrings:
    """Looks for stop strings in the text of tokens.

    Args:
      decode: text of token ids; None if there is no tokenizer, and then no stop string
        may be asked for.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None):
        self._decode = decode

    def check(self, strings: Sequence[str]) -> None:
        """Raises a ValueError if there are strings and nothing to decode with."""
        if strings and self._decode is None:
            raise ValueError(
                f"stop_strings={tuple(strings)} need text: give the engine "
                "decode=tokenizer.decode."
            )

    def end(
        self, tokens: Int[np.ndarray, "T"], num_new: int, strings: Sequence[str]
    ) -> int | None:
        """How many tokens there are up to the first stop string, that string included.

        Args:
          tokens: of the completion so far.
          num_new: the last so many have not been looked at.
          strings: any of these ends the completion.

        Returns:
          At least ``len(tokens) - num_new + 1``; None if there is no stop string.
        """
        if not strings or not num_new:
            return None
        longest = _TOKENS_PER_CHARACTER * max(map(len, strings))
        seen = len(tokens) - num_new
        first = max(seen - longest, 0)

        def found(count):
            text = self._decode(tokens[first:count].tolist())
            return any(string in text for string in strings)

        if not found(len(tokens)):
            return None
        return next(n for n in range(seen + 1, len(tokens) + 1) if found(n))
