"""A call on a mesh: a device computes its rows and heads, and its part of a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata
from attnops.kernels import equally_varying
from attnops.partition import explicit_entry, resharded
from attnops.sharding import BATCH, HEAD, QUERY_LENGTH, correct_spec, get_names_from_partition_spec
from attnops_linear.masks import Tokens
from attnops_linear.nonfinite import separate
from attnops_linear.output import LinearOutput

Forward = Callable[..., LinearOutput]
# The dimensions of each array: "b" the rows, "t" tokens, "h" heads of keys or values.
_AXES: Final = {"query": "bth", "key": "bth", "value": "bth", "beta": "bth", "initial_state": "bh", "mask": "b"}


def run_on_shards(
    function: Forward, args: tuple[jax.Array, ...], options: Mapping[str, Any], metadata: OperationMetadata, mode: str
) -> LinearOutput:
    """``function(*args, **options)``, by `jax.shard_map` where a mesh shards rows, tokens or heads.

    Explicit axes shard what the type of ``value`` says; for others the metadata's rules say it. Axes that do not divide
    rows, tokens or key heads are dropped, and what they shard is gathered.

    Raises:
        ValueError: the metadata's mesh and the current mesh have different axes.
    """
    query, _, value = args
    ambient: Any = jax.sharding.get_abstract_mesh()
    mesh: Any = (metadata.mesh or jax.typeof(value).sharding.mesh) if ambient.empty else ambient
    if metadata.mesh is not None and dict(metadata.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"metadata.mesh has the axes {dict(metadata.mesh.shape)}, but the current mesh has {dict(mesh.shape)}: "
            f"leave metadata.mesh out, or set an equal one"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, size in mesh.shape.items() if size > 1 and kinds[name] == AxisType.Auto}
    is_explicit = AxisType.Explicit in kinds.values()
    ruled = metadata.axis_rules.spec([BATCH, QUERY_LENGTH, HEAD], mode=mode)
    wanted = [
        (*explicit_entry(value, axis), *(name for name in get_names_from_partition_spec([entry]) if name in free))
        for axis, entry in enumerate(ruled)
    ]
    if not is_explicit and not any(wanted):
        return function(*args, **options)
    sizes = query.shape[0], query.shape[1] or 1, query.shape[2]
    entries = dict(zip("bth", correct_spec(P(*wanted), sizes, mesh), strict=True))

    def spec(axes: str) -> P:
        return P(*(entries[axis] for axis in axes))

    arrays = dict(zip(("query", "key", "value"), args, strict=True))
    arrays |= {name: x for name, x in options.items() if name in _AXES or name == "decay"}
    others = {name: x for name, x in options.items() if name not in arrays}
    specs = {name: spec(_AXES.get(name) or ("h" if x.ndim == 1 else "bth")) for name, x in arrays.items()}
    if is_explicit:
        arrays = {
            name: jax.tree.map(lambda y, name=name: resharded(y, specs[name], mesh), x) for name, x in arrays.items()
        }

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        if entries["t"]:
            found = over_sequence(function, arrays, others, entries["t"])
        else:
            args = [arrays.pop(name) for name in ("query", "key", "value")]
            found = function(*args, **arrays, **others)
        return (found.attention_outputs,) if found.state is None else (found.attention_outputs, found.state)

    results = (spec("bth"), spec("bh")) if options.get("return_state") else (spec("bth"),)
    where = {"mesh": mesh} if ambient.empty else {}
    if manual := frozenset(getattr(mesh, "manual_axes", ())):
        where = {"axis_names": {*mesh.axis_names} - manual}
    # That every device computes the same last state is not in the types of what it gathered.
    shard = jax.shard_map(run, in_specs=(specs,), out_specs=results, check_vma=not entries["t"], **where)
    return LinearOutput(*shard(arrays))


def over_sequence(function: Forward, arrays: dict[str, Any], others: Mapping[str, Any], axes: Any) -> LinearOutput:
    """The outputs of a device's tokens, and the state after all, in `jax.shard_map` over mesh axes ``axes``.

    A device's tokens take a state S before them to M S + b, and output o + (M_t)ᵀ S's product with the query. M is a
    matrix [D, D] with beta, whose columns the forward computes as those of values 0 and of the initial state I; else it
    is the product of the decays. One all-gather of M and b gives each device the state before its tokens.
    """
    (B, T, K, D), (H, Dv) = arrays["query"].shape, arrays["value"].shape[2:]
    tokens, reached = Tokens(), None
    if "mask" in arrays:  # of all tokens: XLA would gather what it had sharded to find where documents begin
        first = lax.axis_index(axes) * T
        tokens = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, T, 1), arrays["mask"])
        arrays = arrays | {"mask": tokens}
    if tokens.starts is not None:
        arrays, reached = separate(arrays)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    given = {name: arrays[name] for name in ("decay", "beta", "mask") if name in arrays}
    state = arrays.get("initial_state")
    state = jnp.zeros((B, H, D, Dv), jnp.float32) if state is None else state.astype(jnp.float32)
    options = {name: x for name, x in others.items() if name != "return_state"} | given | {"return_state": True}
    wide = query.astype(jnp.float32)  # outputs of two parts, which are rounded once they are added
    if tokens.is_token is not None:
        wide = jnp.where(tokens.is_token[:, :, None, None], wide, 0)
    if "beta" in given:
        columns = jnp.zeros((B, T, H, D), value.dtype)
        unit = jnp.broadcast_to(jnp.eye(D, dtype=jnp.float32), (B, H, D, D))
        first = jnp.concatenate([jnp.zeros_like(state), unit], axis=-1)
        found = function(wide, key, jnp.concatenate([value, columns], axis=-1), initial_state=first, **options)
        own, through = jnp.split(found.attention_outputs, [Dv], axis=-1)
        assert found.state is not None
        part = found.state
    else:
        found = function(wide, key, value, **options)
        kept = _kept(given.get("decay"), tokens, (B, T, H))
        scale = D**-0.5 if others.get("scale") is None else others["scale"]
        own, through = found.attention_outputs, jnp.repeat(wide * scale, H // K, axis=2) * kept
        last = jnp.broadcast_to(kept[:, -1, :, :], (B, H, D))
        assert found.state is not None
        part = jnp.concatenate([found.state, last[..., None]], axis=-1)
    width, spoiled = part.shape[-1], jnp.zeros((B, H), bool)
    if reached is not None:
        spoiled = reached.state
        flags = (jnp.broadcast_to(x[:, -1, :, None, None], (B, H, D, 1)) for x in (reached.since, reached.continues))
        part = jnp.concatenate([part, *(x.astype(jnp.float32) for x in flags)], axis=-1)
    parts, state, spoiled = equally_varying((lax.all_gather(part, axes), state, spoiled))
    Carry = tuple[jax.Array, jax.Array]

    def advance(before: Carry, part: jax.Array) -> tuple[Carry, Carry]:
        state, spoiled = before
        b, M, flags = jnp.split(part, [Dv, width], axis=-1)
        moved = jnp.einsum("bhcd,bhde->bhce", M, state, precision="highest") if "beta" in given else M * state
        if reached is not None:
            spoiled = (flags[..., 0, 0] > 0) | (flags[..., 0, 1] > 0) & spoiled
        return (moved + b, spoiled), before

    (last, is_nan), befores = lax.scan(advance, (state, spoiled), parts)
    before, spoiled = (lax.dynamic_index_in_dim(x, lax.axis_index(axes), keepdims=False) for x in befores)
    outputs = own + jnp.einsum("bthd,bhde->bthe", through, before, precision="highest")
    if reached is not None:
        outputs = reached._replace(state=spoiled).mark(LinearOutput(outputs), value, tokens.is_token).attention_outputs
        last = jnp.where(is_nan[:, :, None, None], jnp.nan, last)
    return LinearOutput(outputs.astype(query.dtype), last if others.get("return_state") else None)


def _kept(decay: jax.Array | None, tokens: Tokens, shape: tuple[int, int, int]) -> jax.Array:
    """What a state before the tokens keeps up to each, [B, T, Hv, 1 or D]."""
    decay = jnp.zeros(shape) if decay is None else jnp.broadcast_to(decay, (*shape, *decay.shape[3:]))
    decay = decay.reshape(*shape, -1)
    if tokens.is_token is not None:
        decay = jnp.where(tokens.is_token[:, :, None, None], decay, 0)
    kept = jnp.exp(jnp.cumsum(decay, axis=1))
    if tokens.starts is None:
        return kept
    return jnp.where(jnp.cumsum(tokens.starts, axis=1)[:, :, None, None] > 0, 0, kept)
