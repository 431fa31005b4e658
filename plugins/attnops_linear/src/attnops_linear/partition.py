"""A call of arrays whose types are sharded (`jax.sharding.AxisType.Explicit`): a device computes its rows and heads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec as P

from attnops_linear.output import LinearOutput

# The dimensions of each array: "b" the rows, "k" key heads, "h" value heads, "-" anything else.
_AXES: Final = {"query": "b-k", "key": "b-k", "value": "b-h", "beta": "b-h", "initial_state": "bh", "mask": "b"}


def run_on_shards(
    function: Callable[..., LinearOutput], args: tuple[jax.Array, ...], options: Mapping[str, Any]
) -> LinearOutput:
    """``function(*args, **options)``, by `jax.shard_map` over the mesh axes that shard the rows and heads of ``value``.

    Heads are sharded only if the mesh axes divide the key heads. Whatever else is sharded, such as tokens, is gathered.
    """
    value = jax.typeof(args[2])
    mesh = value.sharding.mesh
    if not mesh.explicit_axes:
        return function(*args, **options)
    axes: Any = (*value.sharding.spec, None, None, None)  # type: ignore[misc]
    rows, heads = axes[0], axes[2]
    names = heads if isinstance(heads, tuple) else (heads,) if heads else ()
    size = 1
    for name in names:
        size *= mesh.shape[name]
    if args[0].shape[2] % size:
        heads = None
    arrays = dict(zip(("query", "key", "value"), args, strict=True))
    arrays |= {name: x for name, x in options.items() if name in _AXES or name == "decay"}
    others = {name: x for name, x in options.items() if name not in arrays}

    def spec(axes: str) -> P:
        return P(*({"b": rows, "-": None}.get(axis, heads) for axis in axes))

    specs = {name: spec(_AXES.get(name) or ("h" if x.ndim == 1 else "b-h")) for name, x in arrays.items()}
    place = {name: functools.partial(jax.reshard, out_shardings=specs[name]) for name in arrays}
    placed = {name: jax.tree.map(place[name], x) for name, x in arrays.items()}
    outputs, state = spec("b-h"), spec("bh")

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        args = [arrays.pop(name) for name in ("query", "key", "value")]
        found = function(*args, **arrays, **others)
        return (found.attention_outputs,) if found.state is None else (found.attention_outputs, found.state)

    wanted = (outputs, state) if options.get("return_state") else (outputs,)
    found = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=wanted)(placed)
    return LinearOutput(*found)
