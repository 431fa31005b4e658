"""Array options of an operation's own under a mesh: cut as its class declares, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from attnops.errors import Reason, UnsupportedError
from attnops.partition.parts import SpecOf

# Options whose arrays are the contract's: cut by what is known of them.
CONTRACT: Final = frozenset({"mask", "bias", "sinks", "dropout_key", "softmax_scale", "logits_soft_cap"})


def own_option_specs(name: str, option: Any, axes: Mapping[str, str], sizes: Mapping[str, int], spec_of: SpecOf) -> Any:
    """The partition specs of one option that the contract has not, as a pytree of its structure.

    Args:
        name: the option's.
        option: a pytree; what is no array, or has no dimensions, is the same on every device.
        axes: what the class declares, see `OperationImpl.option_axes`.
        sizes: by letter: B, H and K of the call.
        spec_of: the spec of an array.

    Raises:
        UnsupportedError: the class does not declare the axes of an array.
        ValueError: an array has another shape than is declared.
    """
    return jax.tree.map(lambda x: _spec(name, x, axes.get(name), sizes, spec_of), option)


def own_axis(name: str, axes: Mapping[str, str]) -> int | None:
    """The dimension of an option that is kv heads; None for none."""
    letters = axes.get(name, "")
    return letters.index("k") if "k" in letters else None


def _spec(name: str, x: Any, letters: str | None, sizes: Mapping[str, int], spec_of: SpecOf) -> PartitionSpec:
    shape = jnp.shape(x) if isinstance(x, (jax.Array, np.ndarray)) or hasattr(x, "aval") else ()
    if not shape:
        return PartitionSpec()
    if letters is None:
        reason = Reason(
            name, f"{x.dtype} {list(shape)}", "its axes are not declared, so a mesh can't cut it",
            f"declare option_axes = {{{name!r}: 'h'}} in the class, a letter a dimension of 'b', 'h', 'k' (kv heads) "
            f"or '-' for others; '' for an array that is the same on every device",
        )  # fmt: skip
        raise UnsupportedError(f"{name} can't go through the mesh:\n  - {reason}", [reason])
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
