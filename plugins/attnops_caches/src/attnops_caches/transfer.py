"""CacheRows: rows of a cache as they are stored, on their way to another cache, to host memory or another process."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from attnops.errors import Reason
from attnops.exported import serialised
from attnops.sharding.placing import placed
from attnops_caches.bits import from_bits, to_bits
from attnops_caches.integers import check_size, int32, integers_of_shape
from attnops_caches.layout import TokenLayout
from attnops_caches.placement import Placement, refusal

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops_caches.base import Cache, CacheType
    from attnops_caches.stored import StoredCache


@serialised(layout=(TokenLayout.to_json, TokenLayout.from_json))
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheRows:
    """The tokens of N rows of a cache as they are stored, without the cache's pages and padding. Made by `Cache.take`.

    A pytree of static shapes, which JAX moves: ``jax.device_put(rows, jax.memory.Space.Host)`` to pinned memory of the
    host, `jax.experimental.transfer` to another process. `to_bytes` serialises it. A layer axis is in front of tokens
    and scales; layers share the other arrays.

    Attributes:
        tokens: ``"key"`` [N, K, n, D] and, unless the content is latent, ``"value"`` [N, K, n, Dv], in the codec's
            dtype, narrow floats as bits, two features of int4 in a byte; for scales by token and head also
            ``"key_scale"`` and ``"value_scale"``, float32 [N, K, n]. Slots without a token are 0.
        scales: scales by head or tensor, which the cache was created with, float32 [K] or [], by the same names.
        lengths: indices in use, left padding included, int32 [N].
        starts: tokens of left padding, int32 [N].
        first: the index of the first of the n slots, int32 [N]: above 0 if a ring has overwritten the tokens before it.
        overflowed: whether tokens of the row are missing, see `Cache.take`; bool [N].
        digest: a hash of tokens, positions and lengths, uint32 [N], by which `Cache.put` finds damage. It protects from
            accidents, not from attacks.
        layout: how a token is stored; static.
    """

    tokens: dict[str, jax.Array]
    scales: dict[str, jax.Array]
    lengths: jax.Array
    starts: jax.Array
    first: jax.Array
    overflowed: jax.Array
    digest: jax.Array
    layout: TokenLayout = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> int:
        """n, the most tokens of a row."""
        return self.tokens["key"].shape[-2]

    @property
    def positions(self) -> jax.Array:
        """The position of each slot's token in its sequence, int32 [N, n]; −1 where there is none."""
        index = self.first[..., None] + jnp.arange(self.length, dtype=jnp.int32)
        held = (index >= self.starts[..., None]) & (index < self.lengths[..., None])
        return jnp.where(held, index - self.starts[..., None], -1)

    def hashed(self) -> jax.Array:
        """The hash that ``digest`` must be equal to, uint32 [N]; the same for every n."""
        position, total = self.positions[..., None, :, None], jnp.zeros((), jnp.uint32)
        at = _mixed(position.astype(jnp.uint32))
        for number, name in enumerate(sorted(self.tokens)):
            x = self.tokens[name][..., None] if name.endswith("scale") else self.tokens[name]
            bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
            K, d = x.shape[-3], x.shape[-1]
            feature = jnp.arange(number << 24, (number << 24) + K * d, dtype=jnp.uint32).reshape(K, 1, d)
            terms = jnp.where(position >= 0, _mixed(bits + _mixed(feature + at)), jnp.uint32(0))
            total += terms.sum((-3, -2, -1), dtype=jnp.uint32)
        if total.ndim == 2:  # of all layers
            total = _mixed(total + jnp.arange(total.shape[0], dtype=jnp.uint32)[:, None]).sum(0, dtype=jnp.uint32)
        for x in (self.lengths, self.starts, self.overflowed):
            total = _mixed(total + x.astype(jnp.uint32))
        return total

    def to_bytes(self, multiple: int = 1) -> bytes:
        """The rows in the format of safetensors. Waits for the arrays, and copies them to the host.

        Args:
            multiple: n becomes as many slots as the longest row needs, or the next multiple of this, but no more than
                it is: few n are few programs where the rows are put.

        Raises:
            ModuleNotFoundError: safetensors is not installed.
        """
        from safetensors.numpy import save

        rows: Any = jax.device_get(self)
        most = -(-max(int((rows.lengths - rows.first).max(initial=0)), 1) // multiple) * multiple
        arrays = {f"tokens.{name}": x[..., :most] if name.endswith("scale") else x[..., :most, :]
                  for name, x in rows.tokens.items()}  # fmt: skip
        arrays |= {f"scales.{name}": x for name, x in rows.scales.items()}
        arrays |= {name: getattr(rows, name) for name in _BY_ROW}
        arrays["layout"] = np.frombuffer(json.dumps(self.layout.to_json()).encode(), np.uint8)
        return save({name: np.asarray(x, order="C") for name, x in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`, on JAX's default device. Damaged tokens are found by `Cache.put`.

        Raises:
            ModuleNotFoundError: safetensors is not installed.
            ValueError: they are not what `to_bytes` returns.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(data)
            layout = TokenLayout.from_json(json.loads(arrays.pop("layout").tobytes()))
            by_row: Any = {name: jnp.asarray(arrays.pop(name)) for name in _BY_ROW}
            parts: Any = {"tokens": {}, "scales": {}}
            for name, x in arrays.items():
                part, _, field = name.partition(".")
                parts[part][field] = jnp.asarray(x)
            rows = cls(**parts, **by_row, layout=layout)
            rows.check()
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the bytes are not those of CacheRows.to_bytes, or are cut: {error}") from error
        return rows

    def check(self) -> None:
        """Raise a `ValueError` unless shapes and dtypes are as documented."""
        layout, shape = self.layout, np.shape(self.tokens["key"])
        codec, is_latent = layout.codec, layout.content == "latent"
        stored = to_bits(jnp.zeros((), layout.stored_dtype)).dtype
        features = {"key": layout.head_dim} | ({} if is_latent else {"value": layout.value_head_dim})
        wanted: Any = {name: ((*shape[:-1], layout.elements(d)), stored) for name, d in features.items()}
        scales: Any = {} if codec is None else {f"{name}_scale": (shape[:-1], np.float32) for name in features}
        if codec is not None and codec.scales != "token_head":
            size = shape[-3:-2] if codec.scales == "head" else ()
            scales = {f"scales.{name}": ((*shape[:-4], *size), np.float32) for name in scales}
        wanted |= scales
        wanted |= {name: (shape[-4:-3], dtype) for name, dtype in _BY_ROW.items()}
        found: Any = self.tokens | {f"scales.{name}": x for name, x in self.scales.items()}
        found |= {name: getattr(self, name) for name in _BY_ROW}
        given = {name: (np.shape(x), np.dtype(x.dtype)) for name, x in found.items()}
        if given != wanted or len(shape) not in (4, 5):
            raise ValueError(f"the rows have the arrays {given}, but a row of {layout} has {wanted}")


_BY_ROW = {"lengths": np.int32, "starts": np.int32, "first": np.int32, "overflowed": np.bool_, "digest": np.uint32}


def take(cache: Cache, rows: ArrayLike, length: int | None = None) -> CacheRows:
    """Some rows as they are stored, bit by bit, to `put` them into another cache; with a layer axis, of all layers.

    Args:
        cache: the cache.
        rows: integers [N]; −1 for none. Known values are checked.
        length: the most tokens of a row, left padding included; None for S, which holds every row.

    An entry that is no row, or whose row has more tokens than ``length`` or lacks a page, has no tokens and is
    ``overflowed``; so is one whose row is. Pages may be shared with other rows.

    Memory: N · ``length`` tokens, times L. On a mesh kv heads stay sharded; rows and slots do not.

    Raises:
        TypeError, ValueError: other rows; length is no int of at least 1; the cache is one layer of several.
        UnsupportedError: a `KiviCache`.
    """
    stored, given = _checked("take", cache, rows, None)
    n = cache.length if length is None else min(check_size("length", length), cache.length)
    placement, function = cache.active_placement, functools.partial(_take, n=n)
    if placement is None:
        return function(stored, given)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (cache, given))
    specs = _specs(placement, jax.eval_shape(function, *shapes))
    taken = placement.by_compiler(function, specs, stored, given)
    return jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), taken, specs)  # type: ignore[no-any-return]


def put(cache: CacheType, rows: ArrayLike, taken: CacheRows) -> CacheType:
    """The cache with rows of another one, or its own, in place of some of its rows; with a layer axis, of all layers.

    Storage, pages, length and mesh may differ. Donate the cache, as in ``jax.jit(PagedCache.put, donate_argnums=0)``,
    and its arrays are updated in place. Rows in host memory, or on other devices, are brought to the cache's.

    Args:
        cache: the cache.
        rows: the rows that are replaced, integers [N], all different; −1 for an entry that does nothing. Known values
            are checked; of traced ones that are equal, the first counts.
        taken: N rows from `take`.

    A row is put whole or not at all. It is empty and ``overflowed`` if it has more tokens than the cache has slots; if
    a page that it needs is not in the table (`PagePool.reserve` it before) or is another row's too; if a ring, which it
    was taken from, had overwritten tokens that queries here see; if its scales by head or tensor are not the cache's;
    if ``digest`` shows damage.

    Raises:
        TypeError, ValueError: other rows; tokens of another layout, codec or dtype, another K or L; the cache is one
            layer of several.
        UnsupportedError: a `KiviCache`.
    """
    stored, given = _checked("put", cache, rows, taken.lengths.shape[-1])
    taken.check()
    _check_same(stored, taken)
    placement, key = stored.active_placement, stored.store.key
    is_known = not isinstance(key, jax.core.Tracer) and len(key.devices()) == 1
    taken = jax.device_put(taken, SingleDeviceSharding(*key.devices()) if is_known else jax.memory.Space.Device)
    if placement is None:
        return cast("CacheType", _put(stored, given, taken))
    specs = placement.specs(cache)
    taken = jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), taken, _specs(placement, taken))
    result = placement.by_compiler(_put, specs, stored, given, taken)
    return jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), result, specs)  # type: ignore[no-any-return]


def _checked(verb: str, cache: Cache, rows: ArrayLike, count: int | None) -> tuple[StoredCache, jax.Array]:
    """The cache, and its rows of a `take`, or of a `put` of ``count`` rows, int32 [N]."""
    if not cache.is_stored:
        raise refusal(f"cache.{verb}", Reason(
            "cache", type(cache).__name__, "is no StoredCache, whose tokens are stored one by one",
            "make a DenseCache, WindowCache or PagedCache",
        ))  # fmt: skip
    stored: Any = cache
    stored.check_all_layers(verb)
    shape = (max(np.size(rows), 1) if count is None else count,)
    array = integers_of_shape("rows", rows, [shape], f"integers [N]={shape}" if count else "integers [N], one at least")
    if isinstance(array, np.ndarray):
        if not -1 <= array.min() <= array.max() < cache.batch:
            raise ValueError(f"rows={array.tolist()} must be rows of the cache, 0 to {cache.batch - 1}, or -1 for none")
        if count is not None and len(set(used := array[array >= 0].tolist())) < len(used):
            raise ValueError(f"rows={array.tolist()} has a row twice, but each can be replaced once; -1 is none")
    return stored, int32(array)


def _check_same(cache: StoredCache, taken: CacheRows) -> None:
    """Raise a `ValueError` unless the cache stores tokens as the one that they were taken from."""
    *lead, _, K, _, _ = np.shape(taken.tokens["key"])
    own: Any = {"layout": _layout(cache), "kv_heads": cache.kv_heads, "layers": cache.layers}
    for name, given in {"layout": taken.layout, "kv_heads": K, "layers": lead[0] if lead else None}.items():
        if given != own[name]:
            raise ValueError(
                f"the rows are of a cache with {name}={given}, but this cache has {name}={own[name]}: tokens are moved "
                f"as they are stored, so both must be equal; create one as the other, or append what read() returns"
            )


def _layout(cache: StoredCache) -> TokenLayout:
    """The layout of `CacheRows.tokens`."""
    layout, content = cache.store.layout, "latent" if cache.is_latent else "separate"
    return dataclasses.replace(layout, content=content, width=layout.head_dim)  # type: ignore[arg-type]


def _specs(placement: Placement, rows: CacheRows) -> CacheRows:
    """The partition specs of rows on a mesh: kv heads are sharded."""
    lead, heads = (None,) * (rows.tokens["key"].ndim - 4), placement.kv_heads
    specs: Any = jax.tree.map(lambda _: PartitionSpec(), rows)
    scales = {name: PartitionSpec(*lead, *[heads] * (x.ndim - len(lead))) for name, x in rows.scales.items()}
    tokens = dict.fromkeys(rows.tokens, PartitionSpec(*lead, None, heads))
    return dataclasses.replace(specs, tokens=tokens, scales=scales)  # type: ignore[no-any-return]


@functools.partial(jax.jit, inline=True, static_argnames="n")
def _take(cache: StoredCache, rows: jax.Array, n: int) -> CacheRows:
    cache = cache.without_mesh()
    store, written, S = cache.store, getattr(cache, "written", None), cache.length
    row = jnp.clip(rows, 0, cache.batch - 1)
    lengths, starts = cache.lengths[row], cache.starts[row]
    first = jnp.zeros_like(lengths) if written is None else jnp.maximum(written[row] - S, 0)
    is_whole = cache.positions()[1][row].sum(-1) == jnp.maximum(lengths - jnp.maximum(starts, first), 0)
    fits = (rows == row) & is_whole & (lengths - first <= n)
    lengths, starts, first = (jnp.where(fits, x, 0) for x in (lengths, starts, first))
    index = first[:, None] + jnp.arange(n, dtype=jnp.int32)
    held = ((index >= starts[:, None]) & (index < lengths[:, None]))[:, None, :, None]
    u = store.slots if written is not None else min(n, store.slots)
    blocks = jnp.maximum(cache.row_blocks()[row, : -(-n // u)], 0)

    @_of_each_layer(cache)
    def tokens(x: jax.Array) -> jax.Array:
        x = x if x.ndim == 4 else x[..., None]  # scales
        x = to_bits(x[blocks, :, :u].swapaxes(1, 2).reshape(row.size, cache.kv_heads, -1, x.shape[-1]))
        x = x[:, :, :n] if written is None else jnp.take_along_axis(x, (index % S)[:, None, :, None], 2)
        return jnp.where(held, x, jnp.zeros((), x.dtype))

    arrays = {name: tokens(x) for name, x in store._blocks().items()}
    layout, key = store.layout, arrays["key"]
    parts = {"key": layout.key_of(key)}
    if not cache.is_latent:
        parts["value"] = layout.value_of(key, arrays.get("value"))
    parts |= {name: x[..., 0] for name, x in arrays.items() if name.endswith("scale")}
    overflowed = cache.overflowed[row] | ~fits
    digest = jnp.zeros(lengths.shape, jnp.uint32)
    taken = CacheRows(parts, store.given_scales, lengths, starts, first, overflowed, digest, _layout(cache))
    return dataclasses.replace(taken, digest=taken.hashed())


def _of_each_layer(cache: StoredCache) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of arrays of one layer one of those of all layers, if the cache has several."""
    return jax.vmap if cache.layers is not None else lambda function: function


@functools.partial(jax.jit, inline=True)
def _put(cache: StoredCache, rows: jax.Array, taken: CacheRows) -> StoredCache:
    plain = cache.without_mesh()
    again = jnp.tril(rows[:, None] == rows, -1).any(1)
    to = jnp.where((rows >= 0) & (rows < cache.batch) & ~again, rows, cache.batch)
    fits = _fits(plain, to, taken) & (taken.digest == taken.hashed())
    blocks, fields = _put_rows(plain, to, fits, taken)
    return cache.with_blocks(blocks, **fields)


def _fits(cache: StoredCache, to: jax.Array, taken: CacheRows) -> jax.Array:
    """Which of the rows that were taken the rows ``to`` can hold, bool [N]."""
    lengths, blocks = taken.lengths, cache.row_blocks()
    fits = jnp.ones(lengths.shape, bool)
    for name, scale in cache.store.given_scales.items():
        fits &= (scale == taken.scales[name]).all()
    if hasattr(cache, "window"):
        return fits & (taken.first <= jnp.maximum(taken.starts, lengths - cache.window + 1))
    P = cache.store.own_blocks
    holders = jnp.zeros(P, jnp.int32).at[jnp.where(blocks >= 0, blocks, P)].add(1, mode="drop")
    own = blocks[jnp.clip(to, 0, cache.batch - 1)]
    needed = jnp.arange(blocks.shape[1], dtype=jnp.int32) * cache.store.slots < lengths[:, None]
    is_own = (own >= 0) & (holders[jnp.maximum(own, 0)] == 1)
    return fits & (taken.first == 0) & (lengths <= cache.length) & (is_own | ~needed).all(1)


def _put_rows(
    cache: StoredCache, to: jax.Array, fits: jax.Array, taken: CacheRows
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The arrays of blocks, and those by row, with the rows that fit."""
    store, n, is_ring = cache.store, taken.length, hasattr(cache, "window")
    lengths, starts, first = (jnp.where(fits, x, 0) for x in (taken.lengths, taken.starts, taken.first))
    u = store.slots if is_ring else min(n, store.slots)
    table = cache.row_blocks()[jnp.clip(to, 0, cache.batch - 1), : -(-n // u)]
    m = table.shape[1]
    is_used = jnp.arange(m, dtype=jnp.int32) * u < lengths[:, None]
    blocks = jnp.where(is_used & (to < cache.batch)[:, None], table, store.own_blocks)  # out of range: dropped
    last = (lengths - 1)[:, None]
    token = last - (last - jnp.arange(u, dtype=jnp.int32)) % u - first[:, None]  # in each slot of a ring

    @_of_each_layer(cache)
    def in_blocks(x: jax.Array) -> jax.Array:
        x = x if x.ndim == 4 else x[..., None]
        if is_ring:
            x = jnp.take_along_axis(x, jnp.clip(token, 0, n - 1)[:, None, :, None], 2)
        else:
            x = jnp.pad(x[:, :, : m * u], ((0, 0), (0, 0), (0, max(m * u - n, 0)), (0, 0)))
        return x.reshape(*x.shape[:2], m, u, x.shape[3]).swapaxes(1, 2)

    @_of_each_layer(cache)
    def written(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[blocks, :, :u].set(from_bits(new if x.ndim == 4 else new[..., 0], x.dtype), mode="drop")

    new = store.joined({name: in_blocks(x) for name, x in taken.tokens.items()})
    arrays = {name: written(x, new[name]) for name, x in store._blocks().items()}
    fields = {"lengths": lengths, "starts": starts, "overflowed": taken.overflowed | ~fits}
    if is_ring:  # of a ring that was shortened, the tokens taken back are counted as written
        fields["written"] = jnp.maximum(lengths, jnp.where(first > 0, first + u, 0))
    return arrays, {name: getattr(cache, name).at[to].set(x, mode="drop") for name, x in fields.items()}


def _mixed(x: jax.Array) -> jax.Array:
    """Bits of uint32, mixed (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
