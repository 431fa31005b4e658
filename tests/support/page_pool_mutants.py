"""The page pool with one mistake at a time, made by a change of its source."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from attnops_caches import pool as pool_module

# Each is a change of the source, old and new. The first three are caught by a run of the quick tests.
MUTANTS = {
    "a reference is not given back": ("ids, pool.pages)].add(-1, mode", "ids, pool.pages)].add(0, mode"),
    "a shared page is not counted": ("pool.pages)].add(1, mode", "pool.pages)].add(0, mode"),
    "forks of forks copy from pages not yet written": ("origin[last], -1)", "last, -1)"),
    "released pages are lost": ("pool = _push(dataclasses", "_push(dataclasses"),
    "a released page is free while others hold it": ("& (references == 0)", "& (references < pool.references)"),
    "a dropped page is free while others hold it": ("given & (references[ids] == 0)", "given"),
    "released rows keep their length": ("jnp.where(rows, 0, pool.lengths)", "pool.lengths"),
    "released rows keep their table": ("jnp.where(rows[:, None], -1, pool.table)", "pool.table"),
    "a truncated row writes to a shared page": ("& (pool.references[last] > 1)", "& False"),
    "a truncated row always copies": ("& (pool.references[last] > 1)", ""),
    "a copy pops an empty stack": ("(~copied | (pool.free_count + freed > 0))", "True"),
    "a row's own pages are not there for its copy": ("pool.free_count + freed > 0", "pool.free_count > 0"),
    "a refused truncation shrinks": (
        "shrinks, copied, beyond = shrinks & ok, copied & ok, beyond & ok",
        "copied &= ok",
    ),
    "a partial page is shared": ("slot < full)", "slot <= full)"),
    "a fork pops an empty stack": ("(~partial | (pool.free_count > 0))", "True"),
    "a fork's full row asks for a page": ("~partial | (pool", "False | (pool"),
    "a fork of a refused fork is served": ("pool.ok[s] & ", ""),
    "a fork keeps its target's old pages": ("pool = _drop(pool, old, valid & (old >= 0))", ""),
    "a row that is its own source is emptied": (" & (s != t)", ""),
    "a row out of range is a source": ("(s >= 0) & (s < R)", "True"),
    "two copies to one page": ("& (last[target] == entry)", ""),
    "a page that no row holds is copied": ("& (pool.references[target] > 0)", ""),
    "a reservation gives more pages than there are": ("(more <= left)", "True"),
    "no later row is served": ("left - jnp.where(ok, more, 0), ok", "jnp.where(ok, left - more, 0), ok"),
    "a row of too many pages is served": (" & (needed[:, 0] <= pool.max_pages)", ""),
    "a reservation shrinks": ("jnp.maximum(lengths, pool.lengths)", "lengths"),
    "two rows get one page": (" - popped_before", ""),
    "pages given out stay on the stack": ("free_count=left", "free_count=pool.free_count"),
}


def mutant(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with one change of its source."""
    text = Path(pool_module.__file__).read_text()
    assert old in text
    module = types.ModuleType("mutant_of_pool")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text.replace(old, new), module.__name__, "exec"), module.__dict__)
    return module
