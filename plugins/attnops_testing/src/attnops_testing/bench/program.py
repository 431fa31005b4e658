"""A contender, and its program for a case."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_testing.bench.case import Array, Case

if TYPE_CHECKING:
    from attnops.typing import PyTree

RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A program for one case.

    Attributes:
        run: starts the call that is timed, and returns its results, which may not be computed yet.
        wait: waits for the results of `run`.
        results: a function from a cotangent [B, T, H, D] to the same program's results, numpy arrays by the names of
            `RESULTS`; None for a program that computes no attention and is not checked.
        what: what runs, for people to read.
        temp_bytes: memory in addition to inputs and outputs, in bytes; None if unknown.
        compile_seconds: the time of tracing and compiling; None if nothing is compiled.
        bytes_seen: over a cache, the bytes of the tokens that queries see, as this program reads them.
    """

    run: Callable[[], object]
    wait: Callable[[PyTree], object]
    results: Callable[[Array], dict[str, Array]] | None
    what: str
    temp_bytes: int | None = None
    compile_seconds: float | None = None
    bytes_seen: int | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """An operation, or another library's function, to be measured.

    Attributes:
        name: the name in the table.
        prepare: makes the program for a `Case` or `CacheCase`; raises `Refused` if it can't.
        is_peer: whether it is another library's function.
    """

    name: str
    prepare: Callable[[Any], Ready]
    is_peer: bool = False


def compile_jax(
    case: Case, attend: Callable[[jax.Array, jax.Array, jax.Array, PyTree], jax.Array], extra: PyTree, what: str,
    heads_first: bool = False,
) -> Ready:  # fmt: skip
    """A JAX function as a program.

    Args:
        case: the case.
        attend: ``attend(query, key, value, extra)`` gives the output [B, T, H, D].
        extra: a pytree of further arguments of ``attend``.
        what: what runs, for people to read.
        heads_first: whether ``attend`` has arrays [B, h, T, D], which are made before it is timed.

    Raises:
        attnops_testing.bench.case.Refused: it needs more than the memory limit.
    """

    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, extra: PyTree, d_out: jax.Array
    ) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, extra), query, key, value)
        return out, *pull_back(d_out)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, extra: PyTree) -> tuple[jax.Array, ...]:
        return (attend(query, key, value, extra),)

    def laid(x: Any) -> Any:
        return x.swapaxes(1, 2) if heads_first else x

    function: Callable[..., tuple[jax.Array, ...]] = both if case.backward else forward
    arguments = (*map(laid, case.device_inputs), extra)
    cotangent = (laid(jnp.asarray(case.d_out)),) if case.backward else ()
    start = time.perf_counter()
    # All contenders multiply float32 matrices in full float32, as attnops does by default.
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        compiled = jax.jit(function).lower(*arguments, *cotangent).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    if memory is not None:
        sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
        case.check_memory(sum(sizes), "it")

    def results(d_out: Array) -> dict[str, Array]:
        outputs = compiled(*arguments, *((laid(jnp.asarray(d_out)),) if case.backward else ()))
        return {name: laid(np.asarray(x)) for name, x in zip(RESULTS, outputs, strict=False)}

    return Ready(
        run=lambda: compiled(*arguments, *cotangent),
        wait=jax.block_until_ready,
        results=results,
        what=what,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        compile_seconds=seconds,
    )


def run_torch(case: Case, attend: Callable[..., Any], device: str, what: str) -> Ready:
    """A torch function as a program, run eagerly. Its tensors have heads before length, the layout that torch prefers.

    Args:
        case: the case.
        attend: ``attend(query, key, value)`` of tensors [B, h, T, D] gives the output [B, H, T, D].
        device: "cpu" or "cuda".
        what: what runs, for people to read.
    """
    torch: Any = importlib.import_module("torch")

    def tensor(x: Array) -> Any:
        """A numpy array [B, T, h, D] as a tensor [B, h, T, D]; through float32, since torch does not know numpy's
        bfloat16.
        """
        return torch.from_numpy(x.astype("float32")).to(device, getattr(torch, case.dtype)).transpose(1, 2).contiguous()

    inputs = [tensor(x).requires_grad_(case.backward) for x in case.inputs]

    def run(d_out: Any) -> Any:
        with torch.set_grad_enabled(case.backward):
            out = attend(*inputs)
            return (out, *torch.autograd.grad(out, inputs, d_out)) if case.backward else (out,)

    def wait(outputs: PyTree) -> PyTree:
        if device == "cuda":
            torch.cuda.synchronize()
        return outputs

    def results(d_out: Array) -> dict[str, Array]:
        outputs = wait(run(tensor(d_out)))
        arrays = [x.detach().transpose(1, 2).float().cpu().numpy() for x in outputs]
        return dict(zip(RESULTS, arrays, strict=False))

    d_out = tensor(case.d_out)
    return Ready(run=lambda: run(d_out), wait=wait, results=results, what=what)
