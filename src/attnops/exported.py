"""Pytrees among the arguments and results of programs that `jax.export` serialises."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax.export

from attnops.typing import Leaf

__all__ = ["serialised", "serialised_tuple"]

Class = TypeVar("Class", bound=type)


def serialised(
    **fields: tuple[Callable[[Leaf], Leaf], Callable[[Leaf], Leaf]],
) -> Callable[[Class], Class]:
    """A decorator by which `jax.export` serialises a dataclass; above the one that registers it as a pytree.

    Args:
        **fields: for each static field that JSON can't express, the functions to JSON's types and back.
    """

    def register(cls: Class) -> Class:
        names = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
        name = f"attnops.{cls.__name__}"

        def to_bytes(values: tuple[Leaf, ...]) -> bytes:
            by_name = dict(zip(names, values, strict=True))
            return json.dumps(by_name | {x: to(by_name[x]) for x, (to, _) in fields.items()}).encode()

        def from_bytes(data: bytes) -> tuple[Leaf, ...]:
            by_name: dict[str, Any] = json.loads(bytes(data))
            if sorted(by_name) != sorted(names):
                raise ValueError(
                    f"the program has a {name} with the static fields {sorted(by_name)}, but this version's are "
                    f"{sorted(names)}; export it again with this version of attnops"
                )
            return tuple(fields[x][1](by_name[x]) if x in fields else by_name[x] for x in names)

        # A module that is loaded again, as notebooks do, has registered its name before.
        with contextlib.suppress(ValueError):
            jax.export.register_pytree_node_serialization(
                cls, serialized_name=name, serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
            )
        return cls

    return register


def serialised_tuple(cls: Class) -> Class:
    """A decorator by which `jax.export` serialises a named tuple."""
    with contextlib.suppress(ValueError):
        jax.export.register_namedtuple_serialization(cls, serialized_name=f"attnops.{cls.__name__}")  # type: ignore[type-var]
    return cls
