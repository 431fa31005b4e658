"""`flash_attn_with_kvcache`: attention over caches that are plain arrays, as flash-attn lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import Lengths, Mask
from attnops_adapters.flash_attn_options import alibi, attend, band, flag

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops import OperationMetadata


def flash_attn_with_kvcache(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    cache_seqlens: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: ArrayLike | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
) -> Any:
    """Attention over a cache, to which the tokens ``k`` and ``v``, if given, are added first.

    JAX's arrays do not change: new caches are returned. Donate the old ones to the `jax.jit` of a decoding step.

    Args:
        q: [batch, seqlen, heads, head_dim].
        k_cache: [cache rows, seqlen_cache, kv heads, head_dim]; with ``block_table`` [blocks, block size, kv heads,
            head_dim].
        v_cache: the same shape.
        k: new keys, [batch, seqlen_new, kv heads, head_dim], stored from index ``cache_seqlens`` on.
        v: new values, the same shape.
        rotary_cos: [seqlen_ro, rotary_dim / 2], with ``k`` only: k and q are rotated, k at ``cache_seqlens``,
            ``cache_seqlens + 1``, …; q too if ``causal`` or a window is set, else all queries at ``cache_seqlens``.
        rotary_sin: [seqlen_ro, rotary_dim / 2].
        cache_seqlens: tokens in each row before the new ones, an int or integers [batch]; None for all slots.
        cache_batch_idx: the row of each sequence, integers [batch]; None for the rows in order.
        cache_leftpad: the first slot of each row that has a token, integers [batch].
        block_table: the blocks of each row, integers [batch, blocks per row].
        softmax_scale: None for ``head_dim ** -0.5``.
        causal: whether query i sees key j only where ``j <= i + seqlen_k - seqlen``, ``seqlen_k`` being the row's
            number of tokens with the new ones.
        window_size: (left, right), keys before and after a query; a negative number is no limit.
        softcap: the soft cap of the scores; 0 or less for none.
        rotary_interleaved: whether features 0 and 1, 2 and 3, … are rotated together; else 0 and rotary_dim / 2, ….
        alibi_slopes: [heads] or [batch, heads].
        num_splits: no effect.
        return_softmax_lse: whether to return softmax_lse too, [batch, heads, seqlen] float32.
        operation: the operation's name.
        metadata: further settings, such as platform.

    Returns:
        The output [batch, seqlen, heads, head_dim]; or a tuple of it, softmax_lse if it is asked for, and the new
        ``k_cache`` and ``v_cache`` if ``k`` is given. Traced lengths and indices are not checked: new tokens without a
        slot are lost, and rows and blocks that the cache does not have are read as its first or last.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value, or can't be honoured.
    """
    q, k_cache, v_cache = (jnp.asarray(x) for x in (q, k_cache, v_cache))
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}, but must have rank 4: [batch, seqlen, heads, head_dim]")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {k_cache.shape} and v_cache {v_cache.shape}: all but head_dim must be equal"
        )
    batch, T, heads = q.shape[:3]
    slots = _slots(k_cache, batch, cache_batch_idx, block_table, cache_leftpad)
    lengths = _lengths(cache_seqlens, batch, slots.capacity)
    mask_of_band = band(causal, window_size, offset=0)
    stored = k is not None or v is not None
    if stored:
        new = _new_tokens(k, v, cache_seqlens, (k_cache, v_cache), batch, slots.capacity, lengths)
        keys = new[0]
        if rotary_cos is not None or rotary_sin is not None:
            tables = _tables(rotary_cos, rotary_sin, cache_leftpad, slots.capacity, q.shape[3])
            interleaved = flag("rotary_interleaved", rotary_interleaved)
            at = jnp.asarray(lengths)[:, None]
            q = _rotated(q, tables, at + (jnp.arange(T) if mask_of_band is not None else 0), interleaved)
            keys = _rotated(keys, tables, at + jnp.arange(keys.shape[1]), interleaved)
        k_cache, v_cache = (slots.write(c, x, lengths) for c, x in ((k_cache, keys), (v_cache, new[1])))
        lengths = lengths + keys.shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin are given without k and v, but they are for new tokens only")
    _check_table(block_table, lengths, slots.block, k_cache.shape[0])
    offset = jnp.asarray(lengths, jnp.int32) - T
    mask: Mask = Lengths(jnp.asarray(lengths))
    if mask_of_band is not None:
        placed = band(causal, window_size, offset[:, None])
        assert placed is not None
        mask = mask & placed
    if cache_leftpad is not None:
        first = _row_integers("cache_leftpad", cache_leftpad, batch)
        _check_most("cache_leftpad", first, slots.capacity, f"a row of the cache has {slots.capacity} slots")
        mask = mask & ~Lengths(first)
    out = attend(
        q, slots.read(k_cache), slots.read(v_cache), mask=mask, bias=alibi(alibi_slopes, heads, batch, offset),
        softmax_scale=softmax_scale, softcap=softcap, operation=operation, metadata=metadata,
    )  # fmt: skip
    lse = (out.logsumexp,) if flag("return_softmax_lse", return_softmax_lse) else ()
    caches = (k_cache, v_cache) if stored else ()
    return (out.attention_outputs, *lse, *caches) if lse or caches else out.attention_outputs


class _Slots(NamedTuple):
    """Where the tokens of each row are.

    Attributes:
        capacity: slots per row.
        rows: the row of each sequence in the cache, [batch]; None for all rows in order.
        table: the blocks of each row, [batch, blocks per row]; None without blocks.
        block: slots per block.
    """

    capacity: int
    rows: Any
    table: Any
    block: int

    def read(self, cache: jax.Array) -> jax.Array:
        """[batch, capacity, kv heads, head_dim]."""
        if self.table is not None:
            pages = jnp.take(cache, self.table, axis=0, mode="clip")
            return pages.reshape(self.table.shape[0], self.capacity, *cache.shape[2:])
        return cache if self.rows is None else jnp.take(cache, self.rows, axis=0, mode="clip")

    def write(self, cache: jax.Array, new: jax.Array, lengths: Any) -> jax.Array:
        """The cache with new tokens after the lengths; tokens without a slot are left out."""
        index = jnp.asarray(lengths)[:, None] + jnp.arange(new.shape[1])
        if self.table is None:
            rows = jnp.arange(new.shape[0]) if self.rows is None else jnp.asarray(self.rows)
            rows, slot = jnp.broadcast_to(rows[:, None], index.shape), index
        else:
            column = jnp.minimum(index // self.block, self.table.shape[1] - 1)
            rows, slot = jnp.take_along_axis(jnp.asarray(self.table), column, axis=1), index % self.block
        inside = (index >= 0) & (index < self.capacity) & (rows >= 0)
        rows = jnp.where(inside, rows, cache.shape[0])  # out of range: not written
        return cache.at[rows, slot].set(new.astype(cache.dtype), mode="drop")


def _slots(cache: jax.Array, batch: int, rows: Any, table: Any, leftpad: Any) -> _Slots:
    if table is None:
        if rows is None and cache.shape[0] != batch:
            raise ValueError(
                f"k_cache has {cache.shape[0]} rows and q has batch {batch}: they must be equal without cache_batch_idx"
            )
        given = None if rows is None else _row_integers("cache_batch_idx", rows, batch)
        _check_most("cache_batch_idx", given, cache.shape[0] - 1, f"the cache has {cache.shape[0]} rows")
        return _Slots(cache.shape[1], given, None, cache.shape[1])
    for name, value in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if value is not None:
            raise ValueError(f"block_table and {name} are both given: as in flash-attn, a table has its rows in order")
    blocks = jnp.asarray(table)
    if blocks.ndim != 2 or blocks.shape[0] != batch or not jnp.issubdtype(blocks.dtype, jnp.integer):
        raise ValueError(
            f"block_table has shape {blocks.shape} and dtype {blocks.dtype}, but must be integers [{batch}, blocks]"
        )
    return _Slots(blocks.shape[1] * cache.shape[1], None, blocks, cache.shape[1])


def _row_integers(name: str, values: Any, batch: int) -> Any:
    array = values if isinstance(values, (jax.Array, np.ndarray)) else np.asarray(values)
    if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}, but must be integers [{batch}]")
    return array


def _lengths(lengths: Any, batch: int, capacity: int) -> Any:
    if lengths is None or isinstance(lengths, (int, np.integer)):
        lengths = np.full(batch, capacity if lengths is None else lengths)
    array = _row_integers("cache_seqlens", lengths, batch)
    _check_most("cache_seqlens", array, capacity, f"a row of the cache has {capacity} slots")
    return array.astype(np.int32)


def _check_most(name: str, values: Any, most: int, why: str) -> None:
    """Raise a `ValueError` if known values are not from 0 to ``most``."""
    if values is None or isinstance(values, jax.core.Tracer) or not np.size(values):
        return
    low, high = int(np.min(values)), int(np.max(values))
    if low < 0 or high > most:
        raise ValueError(f"{name} has values from {low} to {high}, but they must be from 0 to {most}: {why}")


def _check_table(table: Any, lengths: Any, block: int, blocks: int) -> None:
    """Raise a `ValueError` if a block that holds tokens is known to be outside the cache."""
    if table is not None and not any(isinstance(x, jax.core.Tracer) for x in (table, lengths)):
        known = np.asarray(table)
        used = np.arange(known.shape[1]) * block < np.asarray(lengths)[:, None]
        _check_most("block_table", known[used], blocks - 1, f"the cache has {blocks} blocks")


def _new_tokens(
    k: Any, v: Any, seqlens: Any, caches: tuple[jax.Array, jax.Array], batch: int, capacity: int, lengths: Any
) -> tuple[jax.Array, jax.Array]:
    if k is None or v is None or seqlens is None:
        missing = [name for name, x in (("k", k), ("v", v), ("cache_seqlens", seqlens)) if x is None]
        raise ValueError(f"k, v and cache_seqlens must be given together, but {' and '.join(missing)} is None")
    k, v = jnp.asarray(k), jnp.asarray(v)
    for name, x, cache in (("k", k, caches[0]), ("v", v, caches[1])):
        if x.shape != (batch, *k.shape[1:2], *cache.shape[2:]):
            raise ValueError(
                f"{name} has shape {x.shape}, but must be [batch={batch}, seqlen_new, kv heads, head_dim], the last "
                f"two {cache.shape[2:]} as in the cache, and seqlen_new the same for k and v"
            )
    why = f"a row of the cache has {capacity} slots, and {k.shape[1]} tokens are added; make the cache longer"
    _check_most("cache_seqlens", lengths, capacity - k.shape[1], why)
    return k, v


def _tables(cos: Any, sin: Any, leftpad: Any, capacity: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if leftpad is not None:
        raise ValueError("rotary_cos and cache_leftpad are both given: rotate q and k before the call")
    cos, sin = jnp.asarray(cos), jnp.asarray(sin)
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] < capacity or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"rotary_cos has shape {cos.shape} and rotary_sin {sin.shape}, but must be [seqlen_ro, rotary_dim / 2] "
            f"with seqlen_ro at least {capacity}, the slots of a row, and rotary_dim at most {head_dim}"
        )
    return cos, sin


def _rotated(x: jax.Array, tables: tuple[jax.Array, jax.Array], positions: jax.Array, interleaved: bool) -> jax.Array:
    """``x`` [batch, length, heads, head_dim] with its first features rotated, computed in float32."""
    cos, sin = (jnp.take(t, positions, axis=0, mode="clip")[:, :, None].astype(jnp.float32) for t in tables)
    size = 2 * cos.shape[-1]
    part = x[..., :size].astype(jnp.float32)
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else jnp.split(part, 2, axis=-1)
    pair = one * cos - two * sin, one * sin + two * cos
    turned = jnp.stack(pair, axis=-1).reshape(part.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., size:]], axis=-1)
