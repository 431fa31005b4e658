"""Contenders: what takes part, and how a case becomes a program that can be timed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops.bench.case import Array, Case, Refused
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.explain import explain
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.registry import OperationRegistry
from attnops.errors import PluginError, UnsupportedError

RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A program for one case.

    Attributes:
        run: starts the call that is timed, and returns what it will give.
        wait: waits until what `run` returned is there.
        results: the same program's results as numpy arrays, by name (see `RESULTS`), for a cotangent [B, T, H, D].
        what: what runs, in words.
        temp_bytes: the memory that it needs beside inputs and outputs; None where that is not known.
        compile_seconds: what tracing and compiling took; None where nothing is compiled.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    results: Callable[[Array], dict[str, Array]]
    what: str
    temp_bytes: int | None = None
    compile_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        name: as the table shows it.
        prepare: the program for a case; raises `Refused` where there is none.
        is_peer: whether it is another library's.
    """

    name: str
    prepare: Callable[[Case], Ready]
    is_peer: bool = False


def find(names: Sequence[str] | None = None) -> list[Contender]:
    """Contenders by name: operations, and peers.

    Args:
        names: names of operations, canonical ones too, or of peers. None: every installed operation that computes
            attention but `auto`, which would be one of the others again, and every peer that is installed.

    Raises:
        ValueError: no operation or peer has the name.
    """
    from attnops.bench.peers import PEERS, missing_peers

    if names is not None:
        return [PEERS[name].contender if name in PEERS else operation(name) for name in dict.fromkeys(names)]
    operations = [name for name in OperationRegistry.list_implementations() if name != "auto" and _is_attention(name)]
    missing = missing_peers()
    return [operation(name) for name in operations] + [p.contender for p in PEERS.values() if p not in missing]


def operation(name: str) -> Contender:
    """An operation as a contender, held to the forward that is meant for the platform.

    Raises:
        UnknownOperationError: none has the name (a `ValueError`).
    """
    with contextlib.suppress(PluginError):  # its row says so
        OperationRegistry.get(name)

    def prepare(case: Case) -> Ready:
        # Where nothing is differentiated, what has no backward pass can take part too.
        mode = "train" if case.backward else "prefill"
        metadata = OperationMetadata(mode=mode, on_unsupported="error")
        try:
            op = OperationRegistry.create(name, metadata)
            assert isinstance(op, OperationImpl)
            request: Any = op.request(*case.device_inputs, mask=case.mask)
            chosen = explain(request, name, metadata).chosen
        except UnsupportedError as error:
            raise Refused("; ".join(map(str, error.reasons)) or str(error)) from None
        except PluginError as error:
            raise Refused(str(error)) from error

        def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
            return op(query, key, value, mask=mask).attention_outputs

        what = f"{chosen.name} (forward_{chosen.forward})"
        if case.traced_mask:
            return compile_jax(case, attend, case.mask, what)
        return compile_jax(case, lambda q, k, v, _: attend(q, k, v, case.mask), None, what)

    return Contender(name, prepare)


def compile_jax(case: Case, attend: Callable[[Any, Any, Any, Any], Any], extra: Any, what: str) -> Ready:
    """A JAX function as a program.

    Args:
        case: the case.
        attend: ``attend(query, key, value, extra)`` gives the output [B, T, H, D].
        extra: a pytree of what it needs beside.
        what: what runs, in words.

    Raises:
        Refused: it needs more than the memory limit.
    """

    def both(query: Any, key: Any, value: Any, extra: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, extra), query, key, value)
        return out, *pull_back(d_out)

    def forward(query: Any, key: Any, value: Any, extra: Any) -> Any:
        return (attend(query, key, value, extra),)

    function: Callable[..., Any] = both if case.backward else forward
    arguments = (*case.device_inputs, extra)
    cotangent = (jnp.asarray(case.d_out),) if case.backward else ()
    start = time.perf_counter()
    # Everybody multiplies float32 in full float32, as attnops does unless told otherwise.
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        compiled = jax.jit(function).lower(*arguments, *cotangent).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    if memory is not None:
        sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
        case.check_memory(sum(sizes), "it")

    def results(d_out: Array) -> dict[str, Array]:
        outputs = compiled(*arguments, *((jnp.asarray(d_out),) if case.backward else ()))
        return {name: np.asarray(x) for name, x in zip(RESULTS, outputs, strict=False)}

    return Ready(
        run=lambda: compiled(*arguments, *cotangent),
        wait=jax.block_until_ready,
        results=results,
        what=what,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        compile_seconds=seconds,
    )


def _is_attention(name: str) -> bool:
    try:
        return OperationRegistry.get(name).computes == ATTENTION
    except PluginError:
        return True  # its row says what is wrong
