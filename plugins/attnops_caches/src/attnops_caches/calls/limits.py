"""CacheLimits: the caches that a reader serves, declared as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnops.errors import Reason

if TYPE_CHECKING:
    from attnops_caches.calls.request import CacheRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """The caches that a reader serves.

    Attributes:
        storages: the classes of caches, by name, such as "PagedCache". None: any.
        codecs: the dtypes of codecs, such as "int8".
        latent: it reads latent content.
        packed: it reads packed rows.

    Raises:
        ValueError: storages or codecs are no collection.
    """

    storages: frozenset[str] | None
    codecs: frozenset[str] = frozenset()
    latent: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        for name in ("storages", "codecs"):
            value: Any = getattr(self, name)
            if value is None and name == "storages":
                continue
            if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise ValueError(f"{name}={value!r} must be a collection, such as {{{value!r}}}")
            object.__setattr__(self, name, frozenset(value))

    def reasons(self, cache: CacheRequest) -> list[Reason]:
        """Every limit that reading ``cache`` in place breaks."""
        reasons = []
        if self.storages is not None and cache.storage not in self.storages:
            reasons.append(
                Reason("cache", cache.storage, f"must be one of {sorted(self.storages)} to be read in place")
            )
        if cache.codec and cache.codec not in self.codecs:
            reasons.append(
                Reason("cache.codec", cache.codec, f"must be one of {sorted(self.codecs)} to be read in place")
            )
        for name, given, can in (("latent", cache.latent, self.latent), ("rows", cache.is_packed, self.packed)):
            if given and not can:
                reasons.append(Reason(name, given, "is not read in place"))
        return reasons
