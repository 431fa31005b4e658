"""A cache modelled as Python lists of tokens, and a real cache with the same tokens and NaN in all other slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from attnops_caches import DenseCache, PagedCache, Quantized, StoredCache, WindowCache
from attnops_testing.cache_codec import Codec, stored_dtype

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """Where a cache stores the token of each index: dense, ring or paged.

    Attributes:
        storage: "dense", "ring" or "paged".
        rows: B.
        slots: slots per block, which is a row, a ring or a page.
        table: for "paged", the pages of each row, in order.
        pages: for "paged", the number of pages of the cache.
    """

    storage: str
    rows: int
    slots: int
    table: tuple[tuple[int, ...], ...] = ()
    pages: int = 0

    def place(self, row: int, index: int) -> tuple[int, int] | None:
        """The block and slot of a token; None if it does not fit."""
        if self.storage == "paged":
            number = index // self.slots
            page = self.table[row][number] if number < len(self.table[row]) else -1
            return None if page < 0 else (page, index % self.slots)
        if self.storage == "ring":
            return row, index % self.slots
        return (row, index) if index < self.slots else None


@dataclasses.dataclass
class Token:
    """A token as it is stored: [K, d] and scales [K], float64. With latent content ``value`` is None."""

    key: Array
    value: Array | None
    key_scale: Array
    value_scale: Array


@dataclasses.dataclass
class CacheModel:
    """The tokens of each row.

    Attributes:
        layout: the layout of the real cache.
        kv_heads, head_dim, value_head_dim, dtype: K, D, Dv and the dtype of tokens that are read.
        codec: how tokens are quantised; None: they are not.
        latent: the number of the key's features that are the value; None for separate values.
        width: stored features per token, padding included; None without padding.
        starts: tokens of left padding of each row.
        scales: the scales of keys and of values, float32 [] or [K], for a codec whose scales must be given.
        window, max_append: the ring's window, and the most tokens per append.
        max_pages: for "paged", the most pages per row.
        rows: the tokens of each row in the order of their indices.
    """

    layout: ModelLayout
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    codec: Codec | None = None
    latent: int | None = None
    width: int | None = None
    starts: tuple[int, ...] = ()
    scales: tuple[Array, Array] | None = None
    window: int = 0
    max_append: int = 0
    max_pages: int = 0
    rows: list[list[Token]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = self.starts or (0,) * self.layout.rows
        self.rows = self.rows or [[] for _ in range(self.layout.rows)]

    def draw(self, rng: np.random.Generator, T: int) -> tuple[Array, Array | None]:
        """Keys and values [B, T, K, d] of new tokens, which all implementations round alike. The last token of the
        first row is 0, to find code that counts non-zero tokens, or divides by a scale of 0.
        """
        scales = self.scales or (None, None)
        arrays = []
        for d, scale in ((self.head_dim, scales[0]), (self.value_head_dim, scales[1])):
            x = rng.uniform(-(3**0.5), 3**0.5, (self.layout.rows, T, self.kv_heads, d)).astype(self._dtype)
            x[0, -1] = 0
            arrays.append(x if self.codec is None else self.codec.settled(x, scale))
        return arrays[0], None if self.latent is not None else arrays[1]

    @property
    def _dtype(self) -> Any:
        return stored_dtype(None, self.dtype)

    @property
    def _stored_dtype(self) -> Any:
        return stored_dtype(self.codec, self.dtype)

    def append(self, row: int, key: Array, value: Array | None) -> None:
        """Append a token [K, d] to a row; it is dropped if it does not fit."""
        if self.layout.place(row, len(self.rows[row])) is None:
            return
        scales = self.scales or (None, None)
        k, k_scale = self._stored(key, scales[0])
        v, v_scale = (None, k_scale) if value is None else self._stored(value, scales[1])
        self.rows[row].append(Token(k, v, k_scale, v_scale))

    def _stored(self, x: Array, scale: Array | None) -> tuple[Array, Array]:
        if self.codec is None:
            return np.asarray(x, np.float64), np.ones(self.kv_heads)
        scale = np.broadcast_to(self.codec.scale(x) if scale is None else scale, (self.kv_heads,))
        return self.codec.encode(x, scale), np.asarray(scale, np.float64)

    def held(self, row: int) -> range:
        """The indices that a row holds, including those of left padding."""
        length = len(self.rows[row])
        return range(max(0, length - self.layout.slots) if self.layout.storage == "ring" else 0, length)

    def dequantised(self, row: int, index: int) -> tuple[Array, Array]:
        """The key [K, D] and the value [K, Dv] of a token, float64."""
        token = self.rows[row][index]
        key = token.key * token.key_scale[:, None]
        return key, key[:, : self.latent] if token.value is None else token.value * token.value_scale[:, None]

    def empty(self) -> StoredCache:
        """A real cache of this layout without arrays."""
        codec = None if self.codec is None else Quantized(self.codec.dtype, self.codec.scales)
        options: dict[str, Any] = {
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self._dtype, "codec": codec,
            "latent": self.latent, "value_head_dim": None if self.latent is not None else self.value_head_dim,
            "starts": np.asarray(self.starts), "batch": self.layout.rows, "width": self.width,
        }  # fmt: skip
        if self.scales is not None:
            options["key_scale"] = self.scales[0]
            if self.latent is None:
                options["value_scale"] = self.scales[1]

        def create() -> StoredCache:
            if self.layout.storage == "dense":
                return DenseCache.create(length=self.layout.slots, **options)
            if self.layout.storage == "ring":
                return WindowCache.create(window=self.window, max_append=self.max_append, **options)
            return PagedCache.create(
                pages=self.layout.pages, page_size=self.layout.slots, max_pages=self.max_pages, **options
            )

        shapes: StoredCache = jax.eval_shape(create)
        return shapes

    def cache(self) -> StoredCache:
        """A real cache with these tokens, in NumPy arrays; every other slot and scale is NaN, or 127 in int8."""
        shapes = self.empty()
        store: dict[str, Any] = {}
        for name in ("key", "value", "key_scale", "value_scale"):
            array = getattr(shapes.store, name)
            if array is None:
                continue
            dtype = array.dtype if name.endswith("scale") else self._stored_dtype
            with np.errstate(invalid="ignore"):  # numpy warns of NaN in 8 bits
                store[name] = np.full(array.shape, 127 if dtype == np.int8 else np.nan, dtype)
            if name.endswith("scale") and self.scales is not None:
                store[name] = np.asarray(self.scales[name == "value_scale"], np.float32)
        for row in range(self.layout.rows):
            for index in self.held(row):
                place = self.layout.place(row, index)
                if index < self.starts[row] or place is None:
                    continue  # left padding is never seen
                for name, x in self._fields(self.rows[row][index], store):
                    store[name][place[0], :, place[1]] = x
        counts = np.array([len(row) for row in self.rows], np.int32)
        fields: dict[str, Any] = {
            # Stores may hold the bits of narrow floats in integers.
            "store": dataclasses.replace(
                shapes.store, **{name: x.view(getattr(shapes.store, name).dtype) for name, x in store.items()}
            ),
            "lengths": counts,
            "starts": np.asarray(self.starts, np.int32),
            "overflowed": np.zeros(self.layout.rows, bool),
        }
        if self.layout.storage == "ring":
            fields["written"] = counts
        if self.layout.storage == "paged":
            table = np.full(shapes.table.shape, -1, np.int32)  # type: ignore[attr-defined]
            for row, pages in enumerate(self.layout.table):
                table[row, : len(pages)] = pages
            fields |= {"table": table, "copied": np.full(self.layout.pages, -1, np.int32)}
        return dataclasses.replace(shapes, **fields)

    def _fields(self, token: Token, store: dict[str, Any]) -> list[tuple[str, Array]]:
        key, value = (x if self.codec is None or x is None else self.codec.stored(x) for x in (token.key, token.value))
        assert key is not None
        if "value" not in store:  # joined or latent, with zeros up to the width
            parts = [key] if value is None else [key, value]
            zeros = np.zeros((len(key), store["key"].shape[-1] - sum(x.shape[-1] for x in parts)), key.dtype)
            key = np.concatenate([*parts[:1], zeros, *parts[1:]], axis=-1)
        fields = [("key", key), ("value", value), ("key_scale", token.key_scale),
                  ("value_scale", token.value_scale)]  # fmt: skip
        by_token = self.codec is not None and self.codec.scales == "token_head"
        return [(k, v) for k, v in fields if k in store and v is not None and (by_token or not k.endswith("scale"))]

    def check(self, cache: StoredCache, before: StoredCache) -> None:
        """Assert that a real cache holds these tokens, and that no other slot has changed.

        Args:
            cache: the real cache after tokens were appended.
            before: the real cache before that, from `cache`.

        Scales may differ by rounding; those of the real cache replace the model's.
        """
        assert [len(row) for row in self.rows] == np.asarray(cache.lengths).tolist(), (
            f"lengths are {np.asarray(cache.lengths).tolist()}, but must be {[len(row) for row in self.rows]}"
        )
        old = np.asarray(before.lengths)
        names = ("key", "value", "key_scale", "value_scale")
        actual, expected = (
            {
                name: np.array(x) if name.endswith("scale") else np.array(x).view(self._stored_dtype)
                for name in names
                if (x := getattr(each.store, name)) is not None
            }
            for each in (cache, before)
        )
        for row in range(self.layout.rows):
            for index in range(max(self.held(row).start, old[row]), len(self.rows[row])):
                place = self.layout.place(row, index)
                assert place is not None
                for name, x in self._fields(self.rows[row][index], expected):
                    real = actual[name][place[0], :, place[1]].astype(np.float64)
                    if name.endswith("scale"):
                        np.testing.assert_allclose(real, x, rtol=1e-6, err_msg=f"{name} of row {row}, index {index}")
                        setattr(self.rows[row][index], name, real)
                    expected[name][place[0], :, place[1]] = real if name.endswith("scale") else x
        for name, x in expected.items():
            same = (actual[name] == x) | (np.isnan(actual[name].astype(np.float32)) & np.isnan(x.astype(np.float32)))
            assert same.all(), f"{name} differs at {np.argwhere(~same)[:3].tolist()} (block, head, slot, feature)"
