"""The partition specs of a call of attention, derived from the specs of query, key and value."""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

from attnops.sharding.mesh import get_names_from_partition_spec
from attnops.sharding.specs import MeshAxes, MeshLike, correct_spec, entry_of, names_of
from attnops.typing import Leaf


@dataclasses.dataclass(frozen=True)
class AttentionShardings:
    """Specs of all arguments and results of a call, derived from the specs of query, key and value.

    Attributes:
        query: [B, T, H, D]; with ``layout="BHTD"`` [B, H, T, D].
        key: [B, S, K, D]; with ``layout="BHTD"`` [B, K, S, D].
        value: [B, S, K, Dv]; with ``layout="BHTD"`` [B, K, S, Dv].
        layout: "BTHD" or "BHTD".
        mesh: the mesh that `fit` corrects specs for; None for no correction.
    """

    query: PartitionSpec
    key: PartitionSpec
    value: PartitionSpec
    layout: str = "BTHD"
    mesh: MeshLike | None = None

    def __str__(self) -> str:
        names = ("query", "key", "value", "output", "logsumexp")
        specs = ", ".join(f"{name} {tuple(getattr(self, name))}" for name in names)
        return f"sharded over the mesh {None if self.mesh is None else dict(self.mesh.shape)}: {specs}"

    @property
    def output(self) -> PartitionSpec:
        """[B, T, H, Dv]; with ``layout="BHTD"`` [B, H, T, Dv]."""
        batch, second, third, _ = _four(self.query)
        return PartitionSpec(batch, second, third, _four(self.value)[3])

    @property
    def logsumexp(self) -> PartitionSpec:
        """[B, H, T]."""
        return self._spec("BHT")

    @property
    def scores(self) -> PartitionSpec:
        """[B, H, T, S], for biases, array masks and weights; see `fit` for dimensions of 1.

        Mesh axes that shard the queries do not shard the keys.
        """
        *rows, keys = self._spec("BHTS")
        used = get_names_from_partition_spec(rows)
        return PartitionSpec(*rows, entry_of(name for name in names_of(keys) if name not in used))

    bias = mask = weights = scores

    @property
    def sinks(self) -> PartitionSpec:
        """[H]."""
        return self._spec("H")

    @property
    def by_batch(self) -> PartitionSpec:
        """[B]: lengths, cache indices."""
        return self._spec("B")

    @property
    def by_query(self) -> PartitionSpec:
        """[B, T]: segment ids and positions of queries."""
        return self._spec("BT")

    @property
    def by_key(self) -> PartitionSpec:
        """[B, S]: segment ids and positions of keys, and padding masks."""
        return self._spec("BS")

    def fit(self, spec: PartitionSpec, array: Leaf) -> PartitionSpec:
        """``spec`` corrected for an array whose dimensions may be 1, or not divisible, see `correct_spec`."""
        return spec if self.mesh is None else correct_spec(spec, array.shape, self.mesh)

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """``spec`` on the mesh.

        Raises:
            ValueError: there is no mesh.
        """
        if self.mesh is None:
            raise ValueError("there is no mesh; set metadata.mesh, or a mesh by jax.set_mesh")
        return NamedSharding(self.mesh, spec)

    def _spec(self, letters: str) -> PartitionSpec:
        """The spec of an array that has these of the dimensions B, T, H and S."""
        length, heads = (1, 2) if self.layout == "BTHD" else (2, 1)
        query, key = _four(self.query), _four(self.key)
        entries = {"B": query[0], "T": query[length], "H": query[heads], "S": key[length]}
        return PartitionSpec(*(entries[letter] for letter in letters))


def _four(spec: PartitionSpec) -> tuple[MeshAxes, ...]:
    return (*spec, *(None,) * (4 - len(spec)))
