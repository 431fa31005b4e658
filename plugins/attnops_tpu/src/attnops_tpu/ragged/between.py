"""Starts of transfers among the loads of the tile that is computed with."""

from __future__ import annotations

import collections
from collections.abc import Callable

from attnops_tpu.ragged.plan import Plan
from attnops_tpu.ragged.tile_sizes import LANES, Starts


class Between:
    """Starts of transfers between the loads of a tile, or after them: the compiler keeps them in this order.

    Attributes:
        step: keys a load.
    """

    def __init__(self, plan: Plan, starts: list[Callable[[], None]]) -> None:
        self._spreads = plan.starts is Starts.BETWEEN
        self.step = LANES if starts and self._spreads else plan.part
        self._starts, self._loads = collections.deque(starts), 2 * plan.K * -(-plan.bk // min(self.step, plan.part))

    def go_on(self) -> None:
        """After a load: start some; of those after a tile's loads, some before the last ones."""
        self._loads -= 1
        count = len(self._starts) // 2 if self._loads == 2 else 0
        for _ in range(-(-len(self._starts) // (self._loads + 1)) if self._spreads else count):
            self._starts.popleft()()

    def finish(self) -> None:
        """After the tile: start the rest."""
        while self._starts:
            self._starts.popleft()()
