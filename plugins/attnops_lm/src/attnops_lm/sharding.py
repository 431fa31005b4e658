"""A model's parameters over a mesh.

A rule is a regular expression of paths such as ``layers.0.attention.q.kernel``, and a `PartitionSpec` or a function
from the parameter to one; the first rule that matches applies. `attnops.sharding.correct_spec` drops mesh axes that the
mesh lacks or that do not divide a dimension, so that one set of rules serves every mesh.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationRegistry
from attnops.sharding import correct_spec
from attnops_lm.linear_layers import LinearLayer
from attnops_lm.params import by_path, nested, path_of, placed, with_values

if TYPE_CHECKING:
    from attnops_lm.model import Decoder

Model = TypeVar("Model", bound="Decoder")
Rule = P | Callable[[Any], P]
PartitionRules = Mapping[str, Rule] | Mapping[tuple[str, ...], Rule] | Iterable[tuple[str, Rule]]

# tp shards weights such that each layer sums over devices only twice: after o, and after down. fsdp shards the other
# dimension. ``base_module`` is a linear layer that LoRA wraps; qvalue and scale are a quantised kernel.
_KERNEL = r"(base_module\.)?(kernel|qvalue|scale)$"
DEFAULT_RULES: tuple[tuple[str, Rule], ...] = (
    (r"^embed$", P("tp", "fsdp")),
    (r"^head\." + _KERNEL, P("fsdp", "tp")),
    (r"\.(q|k|v|gate|up)\." + _KERNEL, P("fsdp", "tp")),
    (r"\.(q|k|v|gate|up)\.(base_module\.)?bias$", P("tp")),
    (r"\.(q|k|v|gate|up)\.lora_a$", P("fsdp", None)),
    (r"\.(q|k|v|gate|up)\.lora_b$", P(None, "tp")),
    (r"\.(o|down)\." + _KERNEL, P("tp", "fsdp")),
    (r"\.(o|down)\.lora_a$", P("tp", None)),
    (r"\.(o|down)\.lora_b$", P(None, "fsdp")),
    (r"\.sinks$", P("tp")),
    # Mixtures of experts: [E, M, 2I], [E, 2I] and [E, I, M].
    (r"\.mlp\.gate_up$", P("ep", "fsdp", "tp")),
    (r"\.mlp\.gate_up_bias$", P("ep", "tp")),
    (r"\.mlp\.down$", P("ep", "tp", "fsdp")),
    (r"\.mlp\.down_bias$", P("ep", None)),
    (r".*", P()),
)


def shard(model: Model, partition_rules: PartitionRules | None = None, mesh: Mesh | None = None) -> Model:
    """A copy whose parameters are sharded over a mesh, and whose attention runs on it.

    With several processes, each holds the same model, and the mesh has the devices of all of them. In a `lazy_init`
    model the shapes get shardings, so that loading a checkpoint never puts all weights on one device.

    Args:
        model: the model, which is not changed.
        partition_rules: the rules; None: `DEFAULT_RULES`, for the mesh axes fsdp, tp and ep; dp replicates.
        mesh: the mesh; None: the mesh of the model's metadata, or of `jax.set_mesh`.

    Raises:
        ValueError: there is no mesh, or a parameter that no rule matches.
    """
    mesh = _mesh_of(model, mesh)
    rules = _pairs(DEFAULT_RULES if partition_rules is None else partition_rules)

    def change(path: str, value: Any) -> Any:
        for pattern, rule in rules:
            if re.search(pattern, path):
                spec = rule if isinstance(rule, P) else rule(value)
                return placed(value, NamedSharding(mesh, correct_spec(spec, value.shape, mesh)))
        raise ValueError(f"no partition rule matches {path}; end the rules with ('.*', PartitionSpec())")

    return with_metadata(with_values(model, change), mesh=mesh)


def gather(model: Model, partition_rules: PartitionRules | None = None, mesh: Mesh | None = None) -> Model:
    """A copy with all parameters on every device of the mesh, for example to save them.

    Args:
        model: the model, which is not changed.
        partition_rules: only parameters that one of these matches are gathered; None: all.
        mesh: the mesh; None: the mesh of the model's metadata, or of `jax.set_mesh`.

    Memory: all parameters on every device.

    Raises:
        ValueError: there is no mesh.
    """
    mesh = _mesh_of(model, mesh)
    patterns = None if partition_rules is None else [pattern for pattern, _ in _pairs(partition_rules)]

    def change(path: str, value: Any) -> Any:
        if patterns is not None and not any(re.search(pattern, path) for pattern in patterns):
            return value
        return placed(value, NamedSharding(mesh, P()))

    return with_metadata(with_values(model, change), mesh=mesh)


def shardings(model: nnx.Module) -> dict[str, Any]:
    """The sharding of each parameter, in nested dicts as `nnx.to_pure_dict` has them."""
    state = nnx.state(model, nnx.Param)
    return nested({path: x.sharding for path, x in by_path(state).items()})


def with_metadata(model: Model, **changes: Any) -> Model:
    """Change fields of the operation's metadata in place, and return the same model."""
    model.metadata = dataclasses.replace(model.metadata, **changes)
    operation: Any = OperationRegistry.create(model.operation_name, model.metadata)
    for layer in model.layers:
        if isinstance(layer.attention, LinearLayer):
            layer.attention.set_metadata(model.metadata)
        else:
            layer.attention.operation = operation
    return model


def _mesh_of(model: Decoder, mesh: Mesh | None) -> Mesh:
    if mesh is None:
        mesh = model.metadata.mesh
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("mesh=None, and neither the model's metadata nor jax.set_mesh has one; give mesh=Mesh(...)")
    return mesh


def _pairs(rules: PartitionRules) -> list[tuple[str, Rule]]:
    items = rules.items() if isinstance(rules, Mapping) else rules
    return [(path_of(key) if isinstance(key, tuple) else key, rule) for key, rule in items]
