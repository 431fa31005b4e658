"""A problem over a cache: one call, the oracle's results for the tokens in the cache, and the comparison."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops_caches import Cache, PagedCache, Rows
from attnops_testing import oracle
from attnops_testing.cache_features import PAGE, CacheSpec
from attnops_testing.cache_masks import ScoreCase, bias_case, mask_case
from attnops_testing.cache_model import CacheModel, ModelLayout
from attnops_testing.problem import check_max_logits
from attnops_testing.tolerance import OUTPUT_FACTOR, assert_close, tolerance

Array = np.ndarray[Any, Any]

B: Final = 3
HEADS: Final = 4
PAGES_OF_A_ROW: Final = 13
SLOTS: Final = PAGES_OF_A_ROW * PAGE
WINDOW: Final = 20
# The number of tokens of each row before its queries, in several tiles of 16. The last row's tokens fill its pages.
BEFORE: Final = (21, 2, 32)
STARTS: Final = (0, 3, 17)
PAGES: Final = B * PAGES_OF_A_ROW + 1  # one belongs to no row


class Foreign(NamedTuple):
    """A storage of another distribution, for tokens in pages, without codec and latent content.

    Attributes:
        of_pages: makes the storage with the tokens of a `PagedCache`.
        to_pages: makes a `PagedCache` with the storage's tokens; the second argument is one of the same sizes.
    """

    of_pages: Callable[[PagedCache], Cache]
    to_pages: Callable[[Cache, PagedCache], PagedCache]


@dataclasses.dataclass(frozen=True)
class CacheProblem:
    """One call over a cache.

    Attributes:
        spec: the description of the problem.
        metadata: the operation's metadata.
        head_dim: D.
        dtype: the dtype of queries, keys and values, if ``spec`` has none.
        seed: the seed of the tokens.
        foreign: another storage that holds the tokens of a `PagedCache`; None for the storages of attnops-caches.
    """

    spec: CacheSpec
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)
    head_dim: int = 16
    dtype: str = "float32"
    seed: int = 0
    foreign: Foreign | None = None

    @property
    def T(self) -> int:
        """Queries per row."""
        return self.spec.T

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The real queries of each row."""
        T = self.T
        return {"full": (T, T, T), "ragged": (T, T // 2, max(T - 1, 1)), "packed": (1, 0, T)}[self.spec.rows]

    @functools.cached_property
    def table(self) -> tuple[tuple[int, ...], ...]:
        """The pages of each row, as many as its tokens need."""
        order = np.random.default_rng(4).permutation(PAGES)
        needed = [-(-(n + count) // PAGE) for n, count in zip(BEFORE, self.counts, strict=True)]
        rows = order[: B * PAGES_OF_A_ROW].reshape(B, PAGES_OF_A_ROW)
        return tuple(tuple(int(page) for page in row[:n]) for row, n in zip(rows, needed, strict=True))

    @functools.cached_property
    def before(self) -> CacheModel:
        """The cache without the queries' tokens."""
        spec = self.spec
        layout = {
            "dense": ModelLayout(storage="dense", rows=B, slots=SLOTS),
            "ring": ModelLayout(storage="ring", rows=B, slots=WINDOW - 1 + max(self.T, PAGE)),
            "paged": ModelLayout(storage="paged", rows=B, slots=PAGE, table=self.table, pages=PAGES),
        }[spec.storage]
        latent = self.head_dim // 2 if spec.content == "latent" else None
        scales = None
        if spec.codec is not None and spec.codec.scales != "token_head":
            # Some tokens exceed the largest number, and are clipped.
            shape = () if spec.codec.scales == "tensor" else (spec.kv_heads,)
            first, second = (np.float32(self.rng.uniform(1.2, 1.6, shape) / spec.codec.largest) for _ in range(2))
            scales = np.asarray(first), np.asarray(second)
        model = CacheModel(
            layout=layout, kv_heads=spec.kv_heads, head_dim=self.head_dim, latent=latent, codec=spec.codec,
            value_head_dim=self.head_dim // 2 if spec.content in ("Dv", "latent") else self.head_dim,
            width={"joined": 2 * self.head_dim + 4, "latent": self.head_dim + 4}.get(spec.content),
            dtype=spec.dtype or self.dtype, starts=STARTS if spec.starts else (), scales=scales, window=WINDOW,
            max_append=max(self.T, PAGE), max_pages=PAGES_OF_A_ROW,
        )  # fmt: skip
        key, value = model.draw(self.rng, max(BEFORE))
        for b in range(B):
            for t in range(BEFORE[b]):
                model.append(b, key[b, t], None if value is None else value[b, t])
        return model

    @functools.cached_property
    def tokens(self) -> tuple[Array, Array | None]:
        """Keys and values of the queries' tokens, [B, T, K, d]."""
        return self.before.draw(self.rng, self.T)

    @functools.cached_property
    def after(self) -> CacheModel:
        """The cache with the queries' tokens."""
        model, (key, value) = copy.deepcopy(self.before), self.tokens
        for b in range(B):
            for t in range(self.counts[b]):
                model.append(b, key[b, t], None if value is None else value[b, t])
        return model

    @functools.cached_property
    def query(self) -> Array:
        """[B, T, H, D]."""
        dtype = jnp.dtype(self.spec.dtype or self.dtype)
        return self.rng.uniform(-(3**0.5), 3**0.5, (B, self.T, HEADS, self.head_dim)).astype(dtype)

    @functools.cached_property
    def mask(self) -> ScoreCase | None:
        name = self.spec.mask
        return None if name is None else mask_case(name, np.random.default_rng(1), B, HEADS, self.T, SLOTS)

    @functools.cached_property
    def bias(self) -> ScoreCase | None:
        name = self.spec.bias
        return None if name is None else bias_case(name, np.random.default_rng(2), B, HEADS, self.T, SLOTS)

    @functools.cached_property
    def sinks(self) -> Array | None:
        dtype = jnp.dtype(self.spec.dtype or self.dtype)
        return np.random.default_rng(3).normal(size=HEADS).astype(dtype) if self.spec.sinks else None

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """For packed rows: (row, first query, number of queries) of each run; the second row has none."""
        return [(2, 1, self.T), (0, 1 + self.T, 1)]

    @property
    def packed_length(self) -> int:
        """N: the queries of all runs, one of padding before them, and two after."""
        return self.T + 4

    def pack(self, x: Array) -> Array:
        """[B, T, …] as [1, N, …]; padding has values of the first row."""
        packed = np.resize(x[1], (self.packed_length, *x.shape[2:])).astype(x.dtype)
        for row, first, count in self.runs:
            packed[first : first + count] = x[row, :count]
        return packed[None]

    def _packed_queries(self, x: Array) -> Array:
        """[B, h, T, S] as [B, h, N, S]: the queries of a run are at their packed indices, in the run's row."""
        packed = np.zeros((*x.shape[:2], self.packed_length, x.shape[3]), x.dtype)
        for row, first, count in self.runs:
            packed[row, :, first : first + count] = x[row, :, :count]
        return packed

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The options of the call, as the caller gives them."""
        spec, options = self.spec, {}
        is_packed = spec.rows == "packed"
        for name, case in (("mask", self.mask), ("bias", self.bias)):
            if case is not None:
                options[name] = case.packed(self._packed_queries) if is_packed and case.packed else case.given
        if self.sinks is not None:
            options["sinks"] = self.sinks
        for name in ("softmax_scale", "logits_soft_cap"):
            if getattr(spec, name) is not None:
                options[name] = getattr(spec, name)
        options |= {name: True for name in ("return_lse", "return_max_logits") if getattr(spec, name)}
        return options

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `program`: query, key, value, cache, and the lengths or rows."""
        key, value = self.tokens
        arrays: list[Any] = [self.query, key, value]
        if self.spec.rows == "packed":
            arrays = [None if x is None else self.pack(x) for x in arrays]
            starts = [1, *(first + count for _, first, count in self.runs)]
            rows = Rows(np.array(starts, np.int32), np.array([row for row, _, _ in self.runs], np.int32))
            return (*arrays, self.cache, rows)
        return (*arrays, self.cache, np.array(self.counts, np.int32) if self.spec.rows == "ragged" else None)

    @property
    def cache(self) -> Cache:
        """The cache of the call."""
        cache = (self.before if self.spec.step else self.after).cache()
        return cache if self.foreign is None else self.foreign.of_pages(cache)  # type: ignore[arg-type]

    def program(self, operation: OperationImpl) -> Any:
        """A function of `arguments` that gives the output, and the cache afterwards."""
        name = "rows" if self.spec.rows == "packed" else "query_lengths"

        def run(query: Any, key: Any, value: Any, cache: Cache, rows: Any) -> Any:
            BHTD = self.metadata.layout == "BHTD"
            query, key, value = (x.swapaxes(1, 2) if BHTD and x is not None else x for x in (query, key, value))
            options = self.options | {name: rows}
            if self.spec.step:
                output, cache = operation.step(query, key, value, cache, **options)
            else:
                output = operation(query, cache, **options)
            out = output.attention_outputs
            by_query = {"logsumexp": output.logsumexp, "max_logits": output.max_logits}
            return out.swapaxes(1, 2) if BHTD else out, by_query, cache

        return run

    def trace(self, operation: OperationImpl) -> None:
        """Trace the call without compiling it, which is enough to find refusals."""
        jax.eval_shape(self.program(operation), *self.arguments)

    def check(self, operation: OperationImpl, compiler_options: dict[str, Any] | None = None) -> None:
        """Assert that the output agrees with the oracle by the tolerance rule, and that the cache holds the tokens.

        Raises:
            AssertionError: the output differs, or the cache does not hold the tokens.
            UnsupportedError: the operation refuses the call.
        """
        program = jax.jit(self.program(operation), compiler_options=compiler_options)
        out, by_query, cache = jax.tree.map(np.asarray, program(*self.arguments))
        if self.spec.step:
            before = self.before.cache()
            given = cache if self.foreign is None else self.foreign.to_pages(cache, before)  # type: ignore[arg-type]
            self.after.check(given, before)
            assert not cache.overflowed.any(), "overflowed is set, but every token fits"
        self.check_output(out, by_query)

    def check_output(self, out: Array, by_query: dict[str, Array | None]) -> None:
        """Assert that the call's output, logsumexp and largest scores agree with the oracle."""
        dtype = self.query.dtype
        assert out.dtype == dtype, f"the output is {out.dtype}, but must be {dtype}"
        found = {name: x for name, x in by_query.items() if x is not None}
        asked = {"logsumexp": self.spec.return_lse, "max_logits": self.spec.return_max_logits}
        assert found.keys() == {name for name, is_asked in asked.items() if is_asked}
        if self.spec.rows == "packed":
            out, found = self._unpacked(out, found)
        arrays = self._arrays()
        exact, narrow = (oracle.attention(*arrays[:3], dtype=d, **arrays[3]) for d in (np.float64, dtype))
        allowed = tolerance(exact.out, narrow.out, exact.out_magnitude, dtype, OUTPUT_FACTOR)
        assert_close("attention_outputs", out, exact.out, allowed)
        if "logsumexp" in found:
            finite = np.where(np.isfinite(exact.logsumexp), exact.logsumexp, 0)
            allowed = tolerance(exact.logsumexp, narrow.logsumexp, finite, dtype, OUTPUT_FACTOR)
            assert_close("logsumexp", found["logsumexp"], exact.logsumexp, allowed)
        if "max_logits" in found:
            check_max_logits(found["max_logits"], exact.max_logits, arrays[:3], arrays[3])

    def _unpacked(self, out: Array, found: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """The output and the numbers by query of packed rows as [B, T, …]; asserts that padding has 0 and −inf."""
        spread = np.zeros((B, self.T, *out.shape[2:]), out.dtype)
        spread_found = {name: np.full((B, HEADS, self.T), -np.inf, np.float32) for name in found}
        is_padding = np.ones(out.shape[1], bool)
        for row, first, count in self.runs:
            spread[row, :count] = out[0, first : first + count]
            for name, x in found.items():
                spread_found[name][row, :, :count] = x[0, :, first : first + count]
            is_padding[first : first + count] = False
        assert (out[0, is_padding] == 0).all(), "padding among packed queries has another output than 0"
        for name, x in found.items():
            assert np.isneginf(x[0][:, is_padding]).all(), f"padding has another {name} than -inf"
        return spread, spread_found

    def _arrays(self) -> tuple[Array, Array, Array, dict[str, Any]]:
        """Query, key, value and options for the oracle; column j of a row is its j-th token."""
        model, spec = self.after, self.spec
        columns = max(len(row) for row in model.rows)
        key = np.zeros((B, columns, spec.kv_heads, model.head_dim))
        value = np.zeros((B, columns, spec.kv_heads, model.value_head_dim))
        visible = np.zeros((B, HEADS, self.T, columns), bool)
        bias = np.zeros((B, HEADS, self.T, columns))
        for b in range(B):
            length, start = len(model.rows[b]), model.starts[b]
            held = np.array([j for j in model.held(b) if j >= start], int)
            for j in held:
                key[b, j], value[b, j] = model.dequantised(b, j)
            for i in range(self.counts[b]):
                position = length - self.counts[b] + i - start
                if position < 0:
                    continue  # a query of left padding
                k = held - start
                for h in range(HEADS):
                    seen = np.ones(len(k), bool) if spec.storage != "ring" else k > position - WINDOW
                    if self.mask is not None:
                        seen = seen & self.mask.meaning(b, h, i, position, k)
                    visible[b, h, i, held] = seen
                    if self.bias is not None:
                        bias[b, h, i, held] = self.bias.meaning(b, h, i, position, k)
        options: dict[str, Any] = {"mask": visible, "bias": None if self.bias is None else bias}
        options |= {"sinks": self.sinks, "softmax_scale": spec.softmax_scale, "logits_soft_cap": spec.logits_soft_cap}
        return self.query, key, value, options
