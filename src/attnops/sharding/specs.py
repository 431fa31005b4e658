"""Partition specs that always fit: axes that the mesh lacks, or that do not divide, are dropped and logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec

_log = logging.getLogger(__name__)

MeshLike: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

# An entry of a spec: the mesh axes that shard a dimension, the major one first.
MeshAxes: TypeAlias = str | tuple[str, ...] | None


def names_of(entry: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(names: Iterable[str]) -> MeshAxes:
    """The entry of a spec for a dimension that these mesh axes shard."""
    axes = tuple(names)
    return axes[0] if len(axes) == 1 else axes or None


def correct_spec(spec: PartitionSpec, shape: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """``spec`` without the axes that ``mesh`` does not have or that do not divide ``shape``.

    Args:
        spec: one entry per dimension (an axis name, a tuple of them, or None); may be shorter than ``shape``.
        shape: the array's shape.
        mesh: the mesh to correct for.

    Returns:
        A spec of length ``len(shape)`` or less. From a tuple of axes the longest prefix that divides is kept.
        Each correction is logged at DEBUG.

    Raises:
        ValueError: ``spec`` has more entries than ``shape`` has dimensions.
    """
    if len(spec) > len(shape):
        raise ValueError(
            f"spec={spec} has {len(spec)} entries, but the array of shape {tuple(shape)} has {len(shape)} dimensions"
        )
    return PartitionSpec(*(_correct_entry(entry, size, mesh) for entry, size in zip(spec, shape, strict=False)))


def _correct_entry(entry: MeshAxes, size: int, mesh: MeshLike) -> MeshAxes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:  # type: ignore[comparison-overlap]
        return entry
    names = names_of(entry)
    kept = tuple(name for name in names if name in mesh.shape)
    while kept and size % math.prod(mesh.shape[name] for name in kept):
        kept = kept[:-1]
    if kept != names:
        _log.debug("spec entry %r for a dimension of %d on mesh %s becomes %r", entry, size, dict(mesh.shape), kept)
    return entry_of(kept)


def create_stable_sharding(
    state_ps: PartitionSpec | None = None,
    preserved_indices: Sequence[int] | None = None,
    clone_ps: PartitionSpec | None = None,
    dep: PartitionSpec | bool | None = True,
    tensor: jax.Array | jax.ShapeDtypeStruct | None = None,
    mesh: MeshLike | None = None,
) -> PartitionSpec | None:
    """A spec that keeps only some dimensions of ``state_ps`` sharded; the others are replicated.

    Args:
        state_ps: the spec to start from; None gives None.
        preserved_indices: the dimensions to keep. None keeps all of ``state_ps``.
        clone_ps: if given, the kept dimensions have this spec's entries instead.
        dep: None gives None, for the spec of an optional array that is absent; any other value has no effect.
        tensor: if given, the result is corrected to this array's shape, see `correct_spec`; needs ``mesh``.
        mesh: the mesh to correct for.

    Raises:
        ValueError: a preserved index is out of the range of ``state_ps``, or of ``clone_ps`` if given.
    """
    if dep is None or state_ps is None:
        return None
    spec = state_ps
    if preserved_indices is not None:
        source = state_ps if clone_ps is None else clone_ps
        for index in preserved_indices:
            if not 0 <= index < len(source):
                raise ValueError(
                    f"preserved_indices={list(preserved_indices)}: {index} is out of the range of {source}"
                )
        kept = set(preserved_indices)
        length = max(len(state_ps), max(kept, default=-1) + 1)
        spec = PartitionSpec(*(source[i] if i in kept else None for i in range(length)))
    if tensor is not None and mesh is not None:
        spec = correct_spec(spec, tensor.shape, mesh)
    return spec
