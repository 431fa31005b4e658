"""Starts of the next tile's transfers, spread over the reads of the current tile."""

from __future__ import annotations

import collections
from collections.abc import Callable


class Between:
    """Starts of transfers, of which each read of a tile is followed by equally many. The compiler keeps this order.

    Attributes:
        has_any: whether there are any starts; then a read is of 128 tokens.
    """

    def __init__(self, starts: list[Callable[[], None]], reads: int) -> None:
        """``reads``: the reads of the tile; if there are fewer, `finish` starts the rest."""
        self.has_any = bool(starts)
        self._starts, self._each = collections.deque(starts), -(-len(starts) // reads)

    def go_on(self) -> None:
        """After a read: start some."""
        for _ in range(min(self._each, len(self._starts))):
            self._starts.popleft()()

    def finish(self) -> None:
        """After the tile: start the rest."""
        while self._starts:
            self._starts.popleft()()
