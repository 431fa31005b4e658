"""The arrays of a call in the kernel's layouts: queries as rows, and the values of masks and biases."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import FlashCall, elementwise_bias, of_bias, of_mask
from attnops_tpu.caches.in_place import PackedArrays, packed_queries
from attnops_tpu.caches.new_tokens import Written
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import Prompts
from attnops_tpu.caches.schedule import ItemSchedule
from attnops_tpu.caches.tile_sizes import LANES


class Kind(enum.Enum):
    """Where a value of a mask or a bias is."""

    SCALAR = "scalar"  # one number per row or item, in scalar memory
    BY_ROW = "by row"  # a number for each row of a tile of scores
    BY_KEY = "by key"  # a number for each key, or for each head and key


class CacheArrays(NamedTuple):
    """Inputs of scores other than query and key, in the order of `values`."""

    scalars: tuple[jax.Array, ...] = ()  # float32 or int32 [B] each, or [items] for values by query
    by_row: tuple[jax.Array, ...] = ()  # float32 or int32 [items, K or 1, R padded to lanes] each
    # int32 [B or 1, nk, rows, bk], the bits of all values by key one after the other; B is the rows of the cache if
    # ``plan.keys_by_cache_row``; None for none.
    by_key: jax.Array | None = None
    # float32 [K] for keys, and for values unless they are latent; empty unless scales are by head.
    scales: tuple[jax.Array, ...] = ()


class KernelInputs(NamedTuple):
    """The arrays of a call of the kernel."""

    query: jax.Array  # [items, K, R, key_lanes], or packed queries [N, K, G, key_lanes] that are read in place
    # arrays of blocks [blocks, K, n, d]: keys, and values unless they are latent or joined; then the scales of keys and
    # of values by token, [blocks, K, n].
    sources: tuple[jax.Array, ...]
    # the block of each page, in pieces int32 [rows · pieces, 1, piece]; and whether it is in the table, see
    # `attnops_tpu.caches.schedule.words_of_pages`. Empty without pages.
    tables: tuple[jax.Array, ...]
    block: jax.Array  # the first block of the cache, int32 [1]
    values: CacheArrays  # values of masks and biases
    schedule: ItemSchedule  # what each item reads
    new: Written | None  # new tokens of rows with one tile of queries; None for a call that writes none
    prompts: Prompts | None  # those of other rows
    packed: PackedArrays | None = None  # for packed queries that are read in place


class KernelResults(NamedTuple):
    """The results of a call of the kernel."""

    out: jax.Array  # [items, K, R, value_lanes], or [N, K, G, value_lanes] for packed queries that are read in place
    # float32 [items, K, R, 128], the same in all lanes, or [items, K, 1, R]; None if the call does not return it
    lse: jax.Array | None
    sources: tuple[jax.Array, ...]  # the sources with the new tokens; empty for a call that writes none


class Value(NamedTuple):
    """A value of a mask or a bias; static."""

    name: tuple[str, int]  # the function's name, and the index among the function's values
    kind: Kind  # where it is
    dtype: jnp.dtype  # the dtype of the function's argument
    by_head: bool  # whether it varies by head
    by_query: bool  # whether it varies by query
    place: int  # the index among the arrays of its kind; by key, the first of its rows


def values(plan: CachePlan) -> list[Value]:
    """The values of the mask, of the bias, and the sinks."""
    count = dict.fromkeys(Kind, 0)
    result = []
    for name, axes, dtype in _axes(plan):
        by_head = "h" in axes
        kind = Kind.BY_ROW if by_head or ("q" in axes and plan.bq > 1) else Kind.SCALAR
        kind = Kind.BY_KEY if "kv" in axes else kind
        result.append(Value(name, kind, dtype, by_head, "q" in axes, count[kind]))
        count[kind] += plan.H if by_head and kind is Kind.BY_KEY else 1
    return result


def rows_by_key(plan: CachePlan) -> int:
    """How many rows values by key have in all."""
    return sum(plan.H if v.by_head else 1 for v in values(plan) if v.kind is Kind.BY_KEY)


def _axes(plan: CachePlan) -> Iterator[tuple[tuple[str, int], frozenset[str], jnp.dtype]]:
    functions = {"mask": plan.scoring.mask, "bias": plan.scoring.bias}
    for name, function in functions.items():
        for i, axes in enumerate(() if function is None else function.values):
            yield (name, i), axes, function.dtypes[i]  # type: ignore[union-attr]
    if plan.scoring.sinks:
        yield ("sinks", 0), frozenset("h"), jnp.dtype(jnp.float32)


def arrays(plan: CachePlan, call: FlashCall, of_keys: FlashCall | None = None, rows: int = 0) -> CacheArrays:
    """The arrays of a call, O(T + S).

    Args:
        plan: the plan of the call.
        call: for scores by slot; key and value have shape and dtype only.
        of_keys: the call that values by key are computed from, see `attnops_tpu.caches.packed.Unpacked`; None for
            ``call``.
        rows: the rows of the cache, which ``of_keys`` has first.
    """
    given = _computed(plan, call, plan.B)
    by_row = given if of_keys is None else _computed(plan, of_keys, rows)
    kinds: dict[Kind, list[jax.Array]] = {kind: [] for kind in Kind}
    for value in values(plan):
        name, i = value.name
        x = (by_row if value.kind is Kind.BY_KEY else given)[name][i]
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
        kinds[value.kind].append(_LAYOUTS[value.kind](plan, x))
    by_key = kinds[Kind.BY_KEY]
    batch = max((x.shape[0] for x in by_key), default=1)
    return CacheArrays(
        tuple(kinds[Kind.SCALAR]), tuple(kinds[Kind.BY_ROW]),
        jnp.concatenate([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in by_key], axis=2) if by_key else None,
    )  # fmt: skip


def _computed(plan: CachePlan, call: FlashCall, B: int) -> dict[str, list[jax.Array]]:
    """The values of the functions of a call, by name, for the first B entries of its batch."""
    shape = B, plan.H, plan.T, plan.S
    given: dict[str, list[jax.Array]] = {"sinks": []}
    if plan.scoring.mask is not None:
        function, leaves, _ = of_mask(call.mask, by_row=True)  # type: ignore[arg-type]
        given["mask"] = function.compute(leaves, shape)
    if plan.scoring.bias is not None:
        bias, leaves = of_bias(elementwise_bias(call.bias), by_row=True)  # type: ignore[arg-type]
        given["bias"] = bias.compute(leaves, shape)
    if call.sinks is not None:
        given["sinks"] = [call.sinks.astype(jnp.float32)[None, :, None, None]]
    return given


def _scalar(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[B or 1, 1, 1, 1] to [B]; or [B or 1, 1, T, 1], if a tile has one query, to [items]."""
    x = jnp.broadcast_to(x[:, 0, :, 0], (plan.B, x.shape[2])).reshape(-1)
    return x if x.shape[0] == plan.B else _padded(plan, x)


def _by_row(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[B or 1, H or 1, T or 1, 1] to [items, K or 1, lanes]; the last query's value is repeated beyond the ragged end:
    a function might divide by 0.
    """
    by_head = x.shape[1] > 1 or plan.H == 1
    x = jnp.broadcast_to(x[..., 0], (plan.B, plan.H if by_head else 1, plan.T))
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.nq * plan.bq - plan.T)), mode="edge")
    if by_head:
        x = x.reshape(plan.B, plan.K, plan.G, plan.nq, plan.bq).transpose(0, 3, 1, 2, 4)
    else:
        x = jnp.broadcast_to(
            x.reshape(plan.B, plan.nq, 1, 1, plan.bq), (plan.B, plan.nq, 1, plan.G, plan.bq)
        )  # fmt: skip
    x = x.swapaxes(3, 4) if plan.N else x
    x = x.reshape(plan.B * plan.nq, x.shape[2], plan.R)
    return _padded(plan, jnp.pad(x, ((0, 0), (0, 0), (0, -plan.R % LANES))))


def _by_key(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[B or 1, H or 1, 1, S] to [B or 1, nk, H or 1, bk], as bits; the last slot's value is repeated to the end."""
    x = lax.bitcast_convert_type(x, jnp.int32)[:, :, 0]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.nk * plan.bk - plan.S)), mode="edge")
    return x.reshape(*x.shape[:2], plan.nk, plan.bk).transpose(0, 2, 1, 3)


_LAYOUTS = {Kind.SCALAR: _scalar, Kind.BY_ROW: _by_row, Kind.BY_KEY: _by_key}


def queries(plan: CachePlan, query: jax.Array) -> jax.Array:
    """[B, T, H, D] to [items, K, R, key_lanes], times the folded factor of the scale, which does not round.

    Packed queries that are read in place are [N, H, D], and become [N, K, G, key_lanes], or as many as a tile.
    """
    if plan.N:
        return packed_queries(plan, query)
    x = query.astype(plan.dtype) * jnp.asarray(plan.folded, plan.dtype)
    x = jnp.pad(x, ((0, 0), (0, plan.nq * plan.bq - plan.T), (0, 0), (0, 0)))
    x = x.reshape(plan.B, plan.nq, plan.bq, plan.K, plan.G, plan.D).transpose(0, 1, 3, 4, 2, 5)
    x = x.reshape(plan.B * plan.nq, plan.K, plan.R, plan.D)
    return _padded(plan, jnp.pad(x, (*[(0, 0)] * 3, (0, plan.key_lanes - plan.D))))


def outputs(plan: CachePlan, x: jax.Array) -> jax.Array:
    """[items, K, R, d] to [B, T, H, d]."""
    x = x[: plan.B * plan.nq]
    if plan.N:
        x = x.reshape(*x.shape[:2], plan.bq, plan.G, x.shape[-1]).swapaxes(2, 3)
    x = x.reshape(plan.B, plan.nq, plan.K, plan.G, plan.bq, x.shape[-1])
    x = x.transpose(0, 1, 4, 2, 3, 5).reshape(plan.B, plan.nq * plan.bq, plan.H, x.shape[-1])
    return x[:, : plan.T]


def in_main_memory(plan: CachePlan, inputs: KernelInputs) -> KernelInputs:
    """``inputs`` whose sources XLA does not keep in vector memory, from where the core would copy small ones by vector
    instructions.
    """
    if plan.interpret:
        return inputs
    with jax.enable_x64(False):
        sources = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in inputs.sources)
    return inputs._replace(sources=sources)


def _padded(plan: CachePlan, x: jax.Array) -> jax.Array:
    """``x`` padded to as many items as grid steps."""
    return jnp.pad(x, [(0, plan.items - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def values_of(plan: CachePlan, name: str) -> list[Value]:
    """The values of a function, "mask" or "bias", in its order; or the sinks."""
    return [value for value in values(plan) if value.name[0] == name]
