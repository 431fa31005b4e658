"""Array options that are not in the contract, under a mesh: sharded as the class declares, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from attnops.errors import Reason, UnsupportedError
from attnops.partition.shards import SpecOf
from attnops.typing import Leaf

# Options of the contract, whose dimensions are known.
CONTRACT: Final = frozenset({"mask", "bias", "sinks", "dropout_key", "softmax_scale", "logits_soft_cap"})


def specs_of_option(
    name: str, option: Leaf, axes: Mapping[str, str], sizes: Mapping[str, int], spec_of: SpecOf
) -> Leaf:
    """The partition specs of an option that is not in the contract, as a pytree of its structure.

    Args:
        name: the option's name.
        option: a pytree; leaves that are not arrays, or have no dimensions, are replicated.
        axes: the class's `OperationImpl.option_axes`: by option, a letter for each dimension.
        sizes: B, H and K of the call, by letter.
        spec_of: the spec of an array.

    Raises:
        UnsupportedError: the class does not declare the axes of an array.
        ValueError: an array's shape does not fit the declared axes.
    """
    return jax.tree.map(lambda x: _spec(name, x, axes.get(name), sizes, spec_of), option)


def kv_head_axes(options: Iterable[str], axes: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """The names of options that are not in the contract and whose arrays have kv heads, with the axis of kv heads."""
    names = (name for name in options if name not in CONTRACT and "k" in axes.get(name, ""))
    return tuple((name, axes[name].index("k")) for name in names)


def _spec(name: str, x: Leaf, letters: str | None, sizes: Mapping[str, int], spec_of: SpecOf) -> PartitionSpec:
    shape = jnp.shape(x) if isinstance(x, (jax.Array, np.ndarray)) or hasattr(x, "aval") else ()
    if not shape:
        return PartitionSpec()
    if letters is None:
        reason = Reason(
            name, f"{x.dtype} {list(shape)}", "its axes are not declared, so that a mesh can't shard it",
            f"declare option_axes = {{{name!r}: 'h'}} in the class, one letter per dimension: 'b', 'h', 'k' (kv "
            f"heads) or '-' for others; '' for a replicated array",
        )  # fmt: skip
        raise UnsupportedError(f"{name} can't be sharded:\n  - {reason}", [reason])
    if not letters:
        return PartitionSpec()
    wanted = [sizes.get(letter) for letter in letters]
    fits = len(wanted) == len(shape) and all(
        full is None or size in (1, full) for size, full in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {shape}, but option_axes declares {letters!r}: each of b, h and k must be 1 or "
            f"{dict(sizes)}"
        )
    return spec_of(tuple(shape), letters)
