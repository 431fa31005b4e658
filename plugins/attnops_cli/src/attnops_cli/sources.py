"""Sources described on the command line: distributions declare them by entry points of the group `GROUP`.

An entry's name is the name of the source's class. Its value is a function of (query, key, value_head_dim, options) that
returns the query, a source with the key's batch, length and kv heads, and the options of the call. The function is
called while tracing, so that no array is allocated; it raises a `ValueError` for an unknown option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import importlib_metadata
import jax

from attnops.dispatch.plugins import normalize
from attnops.dispatch.source import Source
from attnops.errors import pass_interrupt, printable

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

GROUP: Final = "attnops.sources"

# From query [B, T, H, D] and key [B, S, K, D] to the query, the source, and the options of the call.
MakeSource = Callable[[jax.Array, jax.Array], tuple[jax.Array, Source, dict[str, Any]]]


def made_source(name: str | None, options: str | None, value_head_dim: int | None) -> MakeSource | None:
    """A function that makes the source that the command line names; None for none.

    Args:
        name: the entry point's name, in upper or lower case.
        options: ``"page_size=32,codec=int8"``.
        value_head_dim: Dv, if it is given.

    Raises:
        ValueError: no distribution, or more than one, has a source of this name; the source can't be imported; options
            are given without a source, or are not of the form above.
    """
    if name is None:
        if options is not None:
            raise ValueError(f"--source-options={options!r} needs a source; add --source PagedCache, for example")
        return None
    entries = list(importlib_metadata.entry_points(group=GROUP))
    owners = {normalize(x.dist.name): x for x in entries if x.dist and x.name.lower() == name.lower()}
    if not owners:
        known = sorted(entry.name for entry in entries)
        hint = f"use one of {known}" if known else "pip install attnops-caches, for example"
        raise ValueError(f"source={name!r} is unknown; {hint}")
    if len(owners) > 1:
        raise ValueError(f"{' and '.join(sorted(owners))} have a source={name!r}: uninstall all but one of them")
    ((owner, entry),) = owners.items()
    make, given = _called(owner, entry, entry.load), parse_options("source_options", options)

    def made(query: jax.Array, key: jax.Array) -> tuple[jax.Array, Source, dict[str, Any]]:
        result = _called(owner, entry, lambda: make(query, key, value_head_dim, given))
        if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], Source)):
            raise ValueError(f"{entry.value} of {owner} must return (query, source, options)")
        return result

    return made


def _called(owner: str, entry: EntryPoint, function: Callable[[], Any]) -> Any:
    """``function()`` of an entry point; what it raises becomes a `ValueError` that names the distribution."""
    try:
        return function()
    except BaseException as error:
        pass_interrupt(error)
        if isinstance(error, ValueError):
            raise
        what = f"source {entry.name} of {owner} can't be used: {entry.value} raised {type(error).__name__}"
        raise ValueError(f"{what}: {printable(error)}") from error


def parse_options(argument: str, options: str | None) -> dict[str, str]:
    """``"page_size=32,codec=int8"`` as a dict; a `ValueError` that names the argument if it has another form."""
    by_name = {}
    for part in (options or "").split(",") if options else ():
        key, equals, value = (x.strip() for x in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{argument}={options!r} must be name=value, separated by commas: page_size=32")
        by_name[key] = value
    return by_name
