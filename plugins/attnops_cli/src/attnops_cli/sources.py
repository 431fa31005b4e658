"""Sources described on the command line: distributions declare them by entry points of the group `GROUP`.

The entry's name is that of the source's class, its value a function of (query, key, value_head_dim, options), which
returns the query, a source of the key's batch, length and kv heads, and the options of the call. It is called while
tracing, so that no array is allocated, and raises a `ValueError` for an option that the source has not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import importlib_metadata
import jax

from attnops.dispatch.source import Source

GROUP: Final = "attnops.sources"

# Of query [B, T, H, D] and key [B, S, K, D].
MakeSource = Callable[[jax.Array, jax.Array], tuple[jax.Array, Source, dict[str, Any]]]


def made_source(name: str | None, options: str | None, value_head_dim: int | None) -> MakeSource | None:
    """What makes the source that the command line names; None for none.

    Args:
        name: of the entry point, in any case.
        options: ``"page_size=32,codec=int8"``.
        value_head_dim: Dv, if it is given.

    Raises:
        ValueError: no source has this name, options without a source, or text that is no options.
    """
    if name is None:
        if options is not None:
            raise ValueError(f"--source-options={options!r} is given, but no source; give --source PagedCache, say")
        return None
    entries = {entry.name.lower(): entry for entry in importlib_metadata.entry_points(group=GROUP)}
    if name.lower() not in entries:
        known = sorted(entry.name for entry in entries.values())
        which = f"use one of {known}" if known else "pip install attnops-caches, for example"
        raise ValueError(f"source={name!r} is unknown; {which}")
    make, given = entries[name.lower()].load(), _parsed(options)
    return lambda query, key: make(query, key, value_head_dim, given)  # type: ignore[no-any-return]


def _parsed(options: str | None) -> dict[str, str]:
    found = {}
    for part in (options or "").split(",") if options else ():
        key, equals, value = (x.strip() for x in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"source_options={options!r} must be name=value, separated by commas: page_size=32")
        found[key] = value
    return found
