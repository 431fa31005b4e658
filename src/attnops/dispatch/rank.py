"""The order of implementations, in one table: each rank has a reason, which `attnops.explain` prints.

Among the implementations that serve a call, `auto` runs the one whose ``rank(request)`` is first in `Rank`. Inside one
rank a class with a forward for the platform, or the core's own, comes before a class of a plugin that inherits the
native forward; then the higher ``priority`` wins, then the first name. See `attnops.dispatch.ranking`.
"""

from __future__ import annotations

import dataclasses
import enum


class Rank(enum.Enum):
    """How good a choice an implementation is for a request, the best first; the value is the reason."""

    EXCHANGES_KEYS = "a mesh shards the sequence, and this one exchanges keys between devices"
    MEASURED = "measured to be the fastest on this device, by the table of `attnops tune`"
    TILED_KERNEL = "a kernel that reads this mask or bias by tiles, where the vendor's needs a T × S array"
    VENDOR_KERNEL = "the vendor's fused kernel"
    KERNEL = "a forward written for this platform"
    NATIVE_LAYOUT = "plain JAX that is laid out for this platform"
    LINEAR_MEMORY = "O(T + S) memory, where T × S scores no longer fit"
    NATIVE = "plain JAX, with a native forward of its own"
    PRODUCT = "one product of T × S scores, in XLA"
    LOOP = "a loop over tiles, slower on this platform than one product of T × S scores"
    REFERENCE = "the reference, in T × S memory"

    @property
    def reason(self) -> str:
        """Why an implementation has this rank, in a sentence."""
        return self.value

    @property
    def place(self) -> int:
        """Its place in the order, from 1, which is the best."""
        return _PLACES[self]

    def __str__(self) -> str:
        return f"rank {self.place} of {len(Rank)}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class RankBetween:
    """A plugin's rank between two consecutive ranks.

    ::

        RankBetween(Rank.VENDOR_KERNEL, Rank.KERNEL, "a kernel for windows, which reads no tile twice")

    Attributes:
        better: the rank before it.
        worse: the rank after it.
        reason: why an implementation has this rank, in a sentence.

    Raises:
        ValueError: the ranks are not consecutive, or there is no reason.
    """

    better: Rank
    worse: Rank
    reason: str

    def __post_init__(self) -> None:
        ranks = [*Rank]
        if self.better not in ranks or self.worse not in ranks or self.worse.place != self.better.place + 1:
            names = [rank.name for rank in ranks]
            raise ValueError(f"better={self.better!r} and worse={self.worse!r} must be consecutive ranks, of {names}")
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(f"reason={self.reason!r} must say why, in a sentence: attnops.explain prints it")

    @property
    def name(self) -> str:
        """Its name, from its neighbours' names."""
        return f"{self.better.name}–{self.worse.name}"

    @property
    def place(self) -> float:
        """Its place in the order, halfway between its neighbours."""
        return self.better.place + 0.5

    def __str__(self) -> str:
        return f"rank between {self.better.place} and {self.worse.place} of {len(Rank)}: {self.reason}"


_PLACES = {rank: place for place, rank in enumerate(Rank, 1)}
