"""Contenders by name: operations, and peers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.explain import explain
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.platforms import platform_of
from attnops.dispatch.registry import OperationRegistry
from attnops.errors import PluginError, UnsupportedError
from attnops_testing.bench.cache_peers import compiled
from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.case import Case, Refused
from attnops_testing.bench.peers import PEERS
from attnops_testing.bench.program import Contender, Ready, compile_jax

if TYPE_CHECKING:
    from attnops.masks import Mask
    from attnops_caches import Cache


def find(names: Sequence[str] | None = None) -> list[Contender]:
    """Contenders by name: operations, and peers.

    Args:
        names: names of operations, also ``distribution:operation``, or of peers. None: every installed operation that
            computes attention, except `auto`, which picks one of the others, and every installed peer that runs here.

    Raises:
        ValueError: no operation or peer has the name.
    """
    if names is not None:
        return [PEERS[name].contender if name in PEERS else operation(name) for name in dict.fromkeys(names)]
    operations = [name for name in OperationRegistry.list_implementations() if name != "auto" and _is_attention(name)]
    platform = platform_of(jax.devices()[0])
    return [operation(name) for name in operations] + [p.contender for p in PEERS.values() if not p.absent(platform)]


def operation(name: str) -> Contender:
    """An operation as a contender, which must run its forward for the platform.

    Raises:
        UnknownOperationError: no operation has the name (a `ValueError`).
    """
    with contextlib.suppress(PluginError):  # the table's row shows it
        OperationRegistry.get(name)

    def prepare(case: Case | CacheCase) -> Ready:
        # In mode "prefill", operations without a backward pass can run too. Over a cache, T determines the mode.
        mode = None if isinstance(case, CacheCase) else "train" if case.backward else "prefill"
        metadata = OperationMetadata(mode=mode, on_unsupported="error")
        try:
            op = OperationRegistry.create(name, metadata)
            assert isinstance(op, OperationImpl)
            arguments, rows = (case.device_inputs, {}) if isinstance(case, Case) else _cached(case)
            request: Any = op.request(*arguments, mask=case.mask, **rows)
            chosen = explain(request, name, metadata).chosen
        except UnsupportedError as error:
            raise Refused("; ".join(map(str, error.reasons)) or str(error)) from None
        except PluginError as error:
            raise Refused(str(error)) from error

        what = f"{chosen.name} (forward_{chosen.forward})"
        if isinstance(case, CacheCase):
            assert chosen.source_use is not None

            def over(query: jax.Array, cache: Cache, rows: dict[str, Any]) -> jax.Array:
                return op(query, cache, mask=case.mask, **rows).attention_outputs

            return compiled(case, over, (*arguments, rows), f"{what} {chosen.source_use.reads}")

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> jax.Array:
            return op(query, key, value, mask=mask).attention_outputs

        if case.traced_mask:
            return compile_jax(case, attend, case.mask, what)
        return compile_jax(case, lambda q, k, v, _: attend(q, k, v, case.mask), None, what)

    return Contender(name, prepare)


def _cached(case: CacheCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Query and cache, and ``rows`` or ``query_lengths``."""
    query, rows = case.call
    return (query, case.filled), rows


def _is_attention(name: str) -> bool:
    try:
        return OperationRegistry.get(name).computes == ATTENTION
    except PluginError:
        return True  # the table's row shows the error
