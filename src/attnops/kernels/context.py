"""Values set by a ``with`` block that traces depend on, such as the device to compile for."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

import jax

T = TypeVar("T", bound=Hashable)

# The values that are set, as (name, value) by name: a part of the keys of JAX's caches of traces. attnops and its
# plugins make no other context of JAX: a new one changes these keys, and what was traced before is traced again. If a
# plugin made one while the first call of `auto` imports it, that call would be traced and compiled twice.
_VALUES: Final = jax.make_user_context(default_value=())


class TraceContext(Generic[T]):
    """A value that holds in a ``with`` block, and that programs traced in it depend on.

    `jax.jit` traces a function again when the value changes. Use it instead of ``jax.make_user_context``: each new
    context of that kind makes JAX trace every function again.

    ::

        TARGET = TraceContext("attnops-mykernel:target", "")

        with TARGET("sm_90"):
            jax.jit(function)(x)  # reads TARGET.value while it is traced

    Args:
        name: the value's name, unique in the process: ``distribution:name``.
        default: the value outside of such a block.
    """

    def __init__(self, name: str, default: T) -> None:
        self.name, self.default = name, default

    @property
    def value(self) -> T:
        """The value of the innermost block of this thread, else the default."""
        value: T = dict(_VALUES.value).get(self.name, self.default)
        return value

    @contextlib.contextmanager
    def __call__(self, value: T) -> Iterator[None]:
        """A context in which the value is this one. It must be hashable."""
        values = {**dict(_VALUES.value), self.name: value}
        if value == self.default:
            del values[self.name]
        with _VALUES(tuple(sorted(values.items(), key=lambda item: item[0]))):
            yield
