"""A model's parameters, by their paths such as ``layers.0.attention.q.kernel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)


def path_of(parts: tuple[Any, ...]) -> str:
    """The parts of a path, joined by dots."""
    return ".".join(map(str, parts))


def copied(model: Model) -> Model:
    """A copy of the model that shares its arrays."""
    return nnx.merge(*nnx.split(model), copy=True)


def with_values(model: Model, change: Callable[[str, Any], Any], kind: Any = nnx.Variable) -> Model:
    """A copy of the model with the values of some variables changed.

    Args:
        model: the model, which is not changed; the copy shares the other values.
        change: a function from a path and its value, an array or a `jax.ShapeDtypeStruct`, to the new value.
        kind: which variables are changed, such as `flax.nnx.Param`.
    """
    parts: Any = nnx.split(model, kind, ...)
    graphdef, chosen, others = parts
    changed = nnx.map_state(lambda path, x: x.replace(change(path_of(path), x.get_value())), chosen)
    return nnx.merge(graphdef, changed, others, copy=True)


def by_path(state: Any) -> dict[str, Any]:
    """The values of a state or of nested dicts, by their paths."""
    if isinstance(state, nnx.State):
        state = nnx.to_pure_dict(state)
    flat: dict[str, Any] = {}
    for key, value in state.items():
        inner = by_path(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{key}.{path}".rstrip("."): x for path, x in inner.items()}
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their paths, as nested dicts in the form of `nnx.to_pure_dict`: numbers in paths are integer keys."""
    result: dict[Any, Any] = {}
    for path, value in flat.items():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        here = result
        for part in parents:
            here = here.setdefault(part, {})
        here[last] = value
    return result


def merged(model: Model, values: Mapping[str, Any], kind: Any = nnx.Param) -> Model:
    """A copy of the model with some parameters replaced.

    Args:
        model: the model, which is not changed.
        values: arrays by path, nested dicts, or a state; parameters that are not in it are kept.
        kind: the kind of the variables.

    Raises:
        ValueError: the model has no variable at a path, or one of another shape.
    """
    new = by_path(values)
    old = by_path(nnx.state(model, kind))
    if unknown := sorted(set(new) - set(old)):
        raise ValueError(f"the model has no {kind.__name__} {unknown[0]} ({len(unknown)} are unknown)")
    for path, value in new.items():
        if value.shape != old[path].shape:
            raise ValueError(f"{path} has shape {tuple(value.shape)}, but the model's has {tuple(old[path].shape)}")
    return with_values(model, lambda path, x: new.get(path, x), kind)


def components(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters in two parts, ``{"params": …, "lora_params": …}``, each nested dicts that `merged` accepts."""
    flat = by_path(params)
    lora = {path for path in flat if path.endswith((".lora_a", ".lora_b"))}
    return {
        "params": nested({path: x for path, x in flat.items() if path not in lora}),
        "lora_params": nested({path: x for path, x in flat.items() if path in lora}),
    }


def with_modules(model: Model, kind: Any, replacement: Callable[[str, Any], nnx.Module | None]) -> Model:
    """A copy of the model with some modules replaced.

    Args:
        model: the model, which is not changed.
        kind: the class of the modules, or several classes.
        replacement: a function from a path and its module to the new module, or to None to keep the module.
    """
    model = copied(model)
    chosen = [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, kind)]
    for path, module in chosen:
        new = replacement(path_of(path), module)
        if new is None:
            continue
        parent: Any = model
        for part in path[:-1]:
            parent = parent[part] if isinstance(part, int) else getattr(parent, str(part))
        setattr(parent, str(path[-1]), new)
    return model


def bytes_of(model: nnx.Module) -> int:
    """The memory of all variables in bytes; copies on several devices are counted once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))


def placed(value: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """An array, or a `jax.ShapeDtypeStruct`, with this sharding.

    An array that each process has may get a sharding over several processes, if it is the same in all of them.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if value.is_fully_addressable:
        host = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: host[index])
    return jax.jit(lambda x: x, out_shardings=sharding)(value)
