"""The calls that `attnops prove` times on each platform."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from attnops.masks import Full, Mask
from attnops_cli.show import mask_with_values
from attnops_testing.bench import CacheCase, Case, Contender, packed_documents, reading
from attnops_testing.commands.bench_caches import CacheOptions

_CPU: Final = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCase:
    """A call that is timed; every field is of JSON's types.

    Attributes:
        name: the call in a few words.
        length: T = S, or the slots of a cache's row.
        batch, heads, kv_heads, head_dim: B, H, K and D = Dv.
        dtype: the dtype of query, key and value.
        mask: an expression of `attnops.masks`.
        documents: the number of packed documents of random lengths; None for one.
        backward: whether gradients are computed too.
        cache: the class of a cache, over which a step is timed; None for arrays.
        codec: the cache's codec, such as "int8".
        queries: over a cache, new tokens a row.
        packed: over a cache, whether rows of different lengths and queries are packed.
    """

    name: str
    length: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    mask: str = "Causal()"
    documents: int | None = None
    backward: bool = False
    cache: str | None = None
    codec: str | None = None
    queries: int = 1
    packed: bool = False

    def make(self) -> Case | CacheCase:
        """The case, with arrays."""
        shape: dict[str, Any] = {
            "length": self.length, "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads,
            "head_dim": self.head_dim, "dtype": self.dtype,
        }  # fmt: skip
        mask: Mask | None = mask_with_values(self.mask)
        if isinstance(mask, Full):
            mask = None
        if self.cache is None:
            if self.documents is not None:
                segments = packed_documents(self.documents, self.length)
                mask = segments if mask is None else mask & segments
            return Case(**shape, mask=mask, backward=self.backward)
        options = CacheOptions(
            storage=self.cache, page_size=None, codec=self.codec, scales=None, latent=None, queries=self.queries,
            used=None, ragged=self.packed, packed=self.packed,
        )  # fmt: skip
        limit = Case(length=1).memory_limit
        return options.case(**shape, mask=mask, memory_limit=limit)

    @property
    def further(self) -> tuple[Contender, ...]:
        """Contenders that are no attention: over a cache, one read of its bytes."""
        return (reading(),) if self.cache else ()


def timed_cases(platform: str) -> list[TimedCase]:
    """The calls, the smallest first. On accelerators 16,384 tokens or more a call, and 2,048 features of all heads."""
    if platform == _CPU:
        small: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "float32"}
        arrays = [TimedCase(name="causal 1k", length=1024, **small)]
        cached: dict[str, Any] = {**small, "length": 2048, "batch": 4}
    else:
        arrays = [
            TimedCase(name="causal 4k", length=4096, batch=4),
            TimedCase(name="full 4k", length=4096, batch=4, mask="Full()"),
            TimedCase(name="causal 8k", length=8192, batch=2), TimedCase(name="causal 32k", length=32768),
            TimedCase(name="window of 1,024, 16k", length=16384, mask="Causal() & SlidingWindow(1023, 0)"),
            TimedCase(name="16 documents, 16k", length=16384, documents=16),
        ]  # fmt: skip
        cached = {"length": 8192, "batch": 32, "heads": 32, "kv_heads": 8}
    both = [dataclasses.replace(case, name=f"{case.name}, {way}", backward=way != "forward")
            for way in ("forward", "forward and backward") for case in arrays]  # fmt: skip
    steps = [
        TimedCase(name="decode, dense", cache="DenseCache", **cached),
        TimedCase(name="decode, pages", cache="PagedCache", **cached),
        TimedCase(name="decode, pages in int8", cache="PagedCache", codec="int8", **cached),
        TimedCase(name="packed rows over pages", cache="PagedCache", queries=64, packed=True, **cached),
    ]  # fmt: skip
    return both + steps
