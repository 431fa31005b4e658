"""AxisRules: from semantic axes and a runtime mode to the axes of a mesh."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jax.sharding import PartitionSpec

from attnops.sharding import axes as semantic
from attnops.sharding.axes import DynamicShardingAxes, SemanticAxis, ShardingAxes
from attnops.sharding.modes import GENERATION_MODES, MODE_DECODE, MODE_TRAIN, canonicalize_mode
from attnops.sharding.specs import MeshAxes, MeshLike, correct_spec, entry_of, names_of


class Override(enum.Enum):
    """A decode rule that names no mesh axes."""

    INHERIT = "inherit"  # the rule of every other mode


INHERIT: Final = Override.INHERIT
REPLICATE: Final = None

_DATA: Final = ("dp", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisRules:
    """The mesh axes over which each semantic axis is sharded. Frozen and hashable.

    A rule is the name of a mesh axis, a tuple of them (the first is the major one), or None, which replicates. Axes
    that a mesh does not have, or that do not divide a dimension, are dropped, see `correct_spec`.

    In the modes decode and insert the rules of ``decode`` take precedence. There `INHERIT`, the same as leaving an axis
    out, keeps the rule of the other modes, and `REPLICATE`, which is None, replicates: a single query can't be sharded,
    but its keys can.

    Attributes:
        batch: the rule of `BATCH`.
        length: the rule of `LENGTH`.
        query_length: the rule of `QUERY_LENGTH`.
        kv_length: the rule of `KV_LENGTH`.
        head: the rule of `HEAD`.
        kv_head: the rule of `KV_HEAD`.
        head_dim: the rule of `HEAD_DIM` and `KV_HEAD_DIM`.
        bias_head_seq: the rule of `BIAS_HEAD_SEQ`.
        bias_kv_seq: the rule of `BIAS_KV_SEQ`.
        embed: the rule of `EMBED`.
        mlp_intermediate: the rule of `MLP_INTERMEDIATE`.
        vocab: the rule of `VOCAB`.
        expert: the rule of `EXPERT`.
        expert_gate: the rule of `EXPERT_GATE`.
        dp, fsdp, tp, ep, sp: the rules of the kinds of parallelism.
        decode: (semantic axis, rule) pairs for the modes decode and insert; a mapping is converted to its items.
    """

    batch: MeshAxes = _DATA
    length: MeshAxes = "sp"
    query_length: MeshAxes = "sp"
    kv_length: MeshAxes = "sp"
    head: MeshAxes = "tp"
    kv_head: MeshAxes = "tp"
    head_dim: MeshAxes = None
    bias_head_seq: MeshAxes = None
    bias_kv_seq: MeshAxes = None
    embed: MeshAxes = None
    mlp_intermediate: MeshAxes = "tp"
    vocab: MeshAxes = "tp"
    expert: MeshAxes = "ep"
    expert_gate: MeshAxes = None
    dp: MeshAxes = "dp"
    fsdp: MeshAxes = "fsdp"
    tp: MeshAxes = "tp"
    ep: MeshAxes = "ep"
    sp: MeshAxes = "sp"
    decode: tuple[tuple[str, MeshAxes | Override], ...] | Mapping[str, MeshAxes | Override] = (
        (semantic.QUERY_LENGTH, REPLICATE),
        (semantic.LENGTH, REPLICATE),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "decode":
                continue
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))
        given = self.decode.items() if isinstance(self.decode, Mapping) else self.decode
        decode = []
        for axis, rule in given:
            if axis not in _FIELDS:
                raise ValueError(f"decode has the axis {axis!r}, which is not a semantic axis; use one of {[*_FIELDS]}")
            decode.append((axis, rule if isinstance(rule, Override) else _checked(f"decode[{axis}]", rule)))
        object.__setattr__(self, "decode", tuple(decode))

    def mesh_axes(self, axis: SemanticAxis, mode: str = MODE_TRAIN) -> MeshAxes:
        """The mesh axes of a semantic axis, or of several together, in a runtime mode.

        Raises:
            ValueError: ``axis`` is not a semantic axis, or ``mode`` not a runtime mode.
        """
        if axis is None or axis == semantic.EMPTY:
            return None
        if not isinstance(axis, str):
            names = [name for one in axis for name in names_of(self.mesh_axes(one, mode))]
            return entry_of(tuple(dict.fromkeys(names)))
        if axis not in _FIELDS:
            raise ValueError(f"axis={axis!r} is not a semantic axis; use one of {[*_FIELDS]}")
        rule: MeshAxes = getattr(self, _FIELDS[axis])
        if canonicalize_mode(mode) in GENERATION_MODES:
            override = dict(self.decode).get(axis, INHERIT)
            return rule if isinstance(override, Override) else override
        return rule

    def names(self, mode: str = MODE_TRAIN) -> frozenset[str]:
        """All mesh axes that a rule names, in a runtime mode."""
        return frozenset(name for axis in _FIELDS for name in names_of(self.mesh_axes(axis, mode)))

    def spec(
        self,
        axes: ShardingAxes | Sequence[SemanticAxis],
        shape: Sequence[int] | None = None,
        mesh: MeshLike | None = None,
        mode: str | None = None,
    ) -> PartitionSpec:
        """The partition spec of an array.

        A mesh axis shards one dimension only: the first that names it. With ``mesh`` and ``shape`` the spec is
        corrected, see `correct_spec`.

        Args:
            axes: the semantic axis of each dimension, a `DynamicShardingAxes`, or a class of them.
            shape: the array's shape.
            mesh: the mesh to correct the spec for.
            mode: the runtime mode; None: the mode of ``axes``, or train if ``axes`` is a sequence.

        Raises:
            ValueError: an axis or a mode is unknown, or the mode depends on a dimension and ``shape`` is not given.
        """
        given: Any = axes if isinstance(axes, (type, DynamicShardingAxes)) else DynamicShardingAxes(axes, MODE_TRAIN)
        chosen: str | int = given.mode if mode is None else canonicalize_mode(mode)
        if isinstance(chosen, int):
            if shape is None:
                raise ValueError(f"the mode depends on the length of dimension {chosen}; give shape=... or mode=...")
            chosen = MODE_DECODE if shape[chosen] == 1 else MODE_TRAIN
        chosen = canonicalize_mode(chosen)
        used: set[str] = set()
        entries = []
        for axis in given.axes:
            names = tuple(name for name in names_of(self.mesh_axes(axis, chosen)) if name not in used)
            used.update(names)
            entries.append(entry_of(names))
        spec = PartitionSpec(*entries)
        return spec if mesh is None or shape is None else correct_spec(spec, shape, mesh)


# The field of each semantic axis has the constant's name.
_FIELDS: Final[dict[str, str]] = {
    getattr(semantic, field.name.upper()): field.name
    for field in dataclasses.fields(AxisRules)
    if field.name != "decode"
} | {semantic.KV_HEAD_DIM: "head_dim"}


def _checked(name: str, rule: object) -> MeshAxes:
    if rule is None or (isinstance(rule, str) and rule):
        return rule
    if isinstance(rule, (tuple, list)) and all(isinstance(x, str) and x for x in rule) and len(set(rule)) == len(rule):
        return entry_of(tuple(rule))
    raise ValueError(f"{name}={rule!r} must be the name of a mesh axis, a tuple of different ones, or None")


DEFAULT_RULES: Final = AxisRules()
