"""Caches in `attnops bench`: the cases of its options, and their table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer
from rich.table import Table

from attnops.masks import Mask
from attnops_caches import PagedCache, StoredCache
from attnops_caches.described import source
from attnops_cli.output import print_text, printer
from attnops_testing.bench import CacheCase, Contender, Measurement, Tokens, ragged, reading
from attnops_testing.commands.bench_tables import milliseconds, print_reasons, status_text

# Options that describe a cache.
Storage = Annotated[
    str | None,
    typer.Option(help="The cache of keys and values, S slots per row: DenseCache, WindowCache or PagedCache."),
]
PageSize = Annotated[int | None, typer.Option(help="Slots per page.", show_default="16", min=1)]
Codec = Annotated[str | None, typer.Option(help="int8, float8_e4m3fn, float8_e5m2 or int4.")]
Scales = Annotated[
    str | None, typer.Option(help="Scales of the codec: tensor, head or token_head.", show_default="token_head")
]
Latent = Annotated[int | None, typer.Option(help="The number of the key's features that are the value (MLA).", min=1)]


def check_without_cache(options: dict[str, Any]) -> None:
    """Refuse options for caches in a call without a cache.

    Raises:
        ValueError: an option is given; the message names it.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} needs a cache; add --cache PagedCache, for example")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The options of the command line about caches.

    Attributes:
        storage: the class of the cache; None for calls on arrays.
        page_size: slots per page; None for the default.
        codec: the codec's dtype, such as "int8"; None for no codec.
        scales: "tensor", "head" or "token_head": the numbers that share a scale; None for the default.
        latent: the number of the key's features that are the value; None for separate values.
        queries: T; None for 1.
        used: tokens per row, its queries included; None for S.
        ragged: whether rows differ in tokens and queries.
        packed: whether the queries of all rows are packed.
    """

    storage: str | None
    page_size: int | None
    codec: str | None
    scales: str | None
    latent: int | None
    queries: int | None
    used: int | None
    ragged: bool
    packed: bool

    def check(self, *, backward: bool, documents: int | None) -> None:
        """Refuse options that exclude each other.

        Raises:
            ValueError: the message names the options.
        """
        if self.storage is None:
            options = dataclasses.asdict(self)
            check_without_cache({name: value for name, value in options.items() if name != "storage"})
        elif backward:
            raise ValueError("--backward is given, but attention over a cache has no gradient; leave it out")
        elif documents is not None:
            raise ValueError("--documents is given, but a cache has one sequence per row; leave it out")

    def case(
        self,
        *,
        length: int,
        batch: int,
        heads: int,
        kv_heads: int | None,
        head_dim: int,
        dtype: str,
        mask: Mask | None,
        memory_limit: int,
    ) -> CacheCase:
        """The case with caches of ``length`` slots per row.

        Raises:
            ValueError: there is no such cache, or the tokens do not fit it.
        """
        assert self.storage is not None
        kv_heads, queries, used = kv_heads or heads, self.queries or 1, self.used or length
        lengths, counts = ragged(batch, used, queries) if self.ragged else ((used,) * batch, (queries,) * batch)
        tokens = Tokens(
            lengths=lengths, queries=counts, slots=max(used, length), heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, latent=self.latent, dtype=dtype,
        )  # fmt: skip
        storage = self.storage

        def make() -> StoredCache:
            query, key = (
                jax.ShapeDtypeStruct((batch, n, h, head_dim), dtype) for n, h in ((queries, heads), (length, kv_heads))
            )
            given = {"page_size": self.page_size, "codec": self.codec, "scales": self.scales, "latent": self.latent}
            options = {name: str(x) for name, x in given.items() if x is not None}
            return source(storage, query, key, tokens.value_head_dim, options)[1]

        cache = jax.eval_shape(make)
        return CacheCase(tokens=tokens, cache=cache, mask=mask, packed=self.packed, memory_limit=memory_limit)

    def contenders(self, compared: list[Contender]) -> list[Contender]:
        """The compared contenders; over a cache also one that only reads the bytes of the tokens, and another one for
        peers' arrays if these have another number of bytes.
        """
        if self.storage is None:
            return compared
        differ = self.codec is not None or self.latent is not None
        plain = [reading(plain=True)] if differ and any(c.is_peer for c in compared) else []
        return [*compared, reading(), *plain]


def describe_cache_case(case: CacheCase, mask: str) -> str:
    """The title of a table: everything except S and the dtype, which have columns."""
    tokens, cache = case.tokens, case.cache
    parts = [
        f"B{tokens.batch} H{tokens.heads} K{tokens.kv_heads} D{tokens.head_dim}",
        cache.storage + (f" of pages of {cache.page_size}" if isinstance(cache, PagedCache) else ""),
        *([str(cache.codec)] if cache.codec is not None else []),
        *([f"latent {tokens.latent}"] if tokens.latent is not None else []),
        f"T={_range(tokens.queries)}" + (" packed" if case.packed else ""),
        mask,
    ]
    return ", ".join(parts)


def print_cache_measurements(measurements: Sequence[Measurement], title: str) -> None:
    """Print the table, then details for which it has no column."""
    columns = ("dtype", "S", "used", "operation", "best", "median", "GB/s", "of read", "memory", "")
    print_text(f"{title}\n")
    console = printer()
    gap = 2 if console.width >= 100 else 1
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("dtype", "operation", "") else "right", no_wrap=True)
    previous = None
    for m in measurements:
        case = m.case
        assert isinstance(case, CacheCase)
        if previous is not None and previous is not case:
            table.add_row()
        first = (case.dtype, f"{case.length:,}", _range(case.tokens.lengths)) if previous is not case else ("", "", "")
        share = share_of_read(m, measurements)
        table.add_row(
            *first,
            m.name,
            milliseconds(m.best),
            milliseconds(m.median),
            f"{m.bandwidth / 1e9:,.1f}" if m.bandwidth else "",
            f"{share:.2f}" if share else "",
            "" if m.temp_bytes is None else f"{m.temp_bytes / 2**20:,.1f} MiB",
            status_text(m),
        )
        previous = case
    console.print(table)
    print_text("")
    for name, what in dict.fromkeys((m.name, m.what.partition(": ")[0]) for m in measurements if m.what):
        print_text(f"{name}: {what}")
    print_reasons(measurements)
    if any(m.checked_rows for m in measurements):
        print_text(
            f"\nChecked before timing, against float64: {_checked(measurements)}. GB/s is of the tokens that are seen."
        )


def share_of_read(m: Measurement, measurements: Sequence[Measurement]) -> float | None:
    """The bandwidth divided by that of one read of as many bytes, in the same case."""
    reads = [x for x in measurements if x.case is m.case and x.name.startswith("one read") and x.bandwidth]
    same = next((x for x in reads if x.bytes_seen == m.bytes_seen), None)
    if m.bandwidth is None or same is None or same.bandwidth is None:
        return None
    return m.bandwidth / same.bandwidth


def _checked(measurements: Sequence[Measurement]) -> str:
    checked: dict[Any, tuple[int, int]] = {}
    for m in measurements:
        assert isinstance(m.case, CacheCase)
        if m.checked_rows:
            checked[m.case.label] = m.checked_rows, sum(m.case.tokens.queries)
    some = [f"{rows} of {every}" for rows, every in checked.values() if rows < every]
    return f"{', '.join(some)} queries" if some else "all queries"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
