"""Kernels on a host without a TPU: in Pallas's interpreter, or refused when they are lowered for the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from attnops.kernels import TraceContext

# Part of the key of JAX's cache of compiled functions.
_RACES: TraceContext[bool] = TraceContext("attnops-tpu:races", False)


def interpret_params(interpret: bool) -> Any:
    """`pallas_call`'s ``interpret``: False, or the interpreter's parameters, with NaN for uninitialised memory."""
    if not interpret:
        return False
    from jax.experimental.pallas import tpu as pltpu

    _allow_in_checkpoint()
    jax.monitoring.record_event("/attnops/kernel/interpreted")
    return pltpu.InterpretParams(detect_races=_RACES.value, uninitialized_memory="nan", out_of_bounds_reads="raise")


@functools.cache
def _allow_in_checkpoint() -> None:
    """Allow the interpreter's host callbacks inside `jax.checkpoint`, which may run them twice."""
    from jax._src import callback, effects

    for effect in (callback.IOEffect, callback.OrderedIOEffect):
        effects.remat_allowed_effects.add_type(effect)


@contextlib.contextmanager
def detect_races() -> Iterator[None]:
    """Interpret with the race detector, and raise at the end if it found a race; slower.

    Raises:
        RuntimeError: two accesses of a buffer, one of them a write, are unordered. Newer JAX raises it at once.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    with _RACES(True):
        try:
            yield
        except Exception:
            interpret_pallas_call.reset_tpu_interpret_mode_state()  # required after any exception
            raise
        races = interpret_pallas_call.races
        if races is not None and races.races_found:
            interpret_pallas_call.reset_tpu_interpret_mode_state()  # otherwise the race would be reported again
            raise RuntimeError("the interpreter found a data race between accesses of a buffer; it printed which")


def for_a_tpu(x: jax.Array) -> jax.Array:
    """``x`` itself, an input of a kernel that is not interpreted.

    Raises:
        NotImplementedError: when it is lowered for another platform, or runs there outside of `jax.jit`.
    """
    same: jax.Array = _for_a_tpu.bind(x)
    return same


def _run(x: jax.Array) -> jax.Array:
    platforms = tuple({device.platform for device in x.devices()})
    return x if platforms == ("tpu",) else _refuse(platforms)


def _refuse(platforms: tuple[str, ...]) -> NoReturn:
    raise NotImplementedError(
        f'platform="tpu" was asked for, but the devices are {", ".join(map(repr, platforms))}: kernels for TPUs run on '
        "TPUs alone; leave platform out for this machine's operation, OperationMetadata(interpret=True) runs them in "
        "an interpreter, and jax.export or attnops_tpu.aot.compile_for compiles them for a TPU that is elsewhere"
    )


_for_a_tpu: Final = Primitive("attnops_tpu_for_a_tpu")
_for_a_tpu.def_impl(_run)
_for_a_tpu.def_abstract_eval(lambda x: x)
batching.defvectorized(_for_a_tpu)
mlir.register_lowering(_for_a_tpu, lambda context, x: _refuse(tuple(context.module_context.platforms)))
mlir.register_lowering(_for_a_tpu, lambda _, x: [x], platform="tpu")
