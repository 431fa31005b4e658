"""`attnops tune`: times tile sizes near the table's, and calls of `flash` and of cuDNN, on this machine's GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal
from attnops_triton import tuned
from attnops_triton.aot import Binary, compile_for, kernels
from attnops_triton.flash.measured import CALLS, CUDNN_CALLS, KERNELS, trying
from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.tile_sizes import choose, specialised_rows
from attnops_triton.language.compat import device_arch, device_name
from attnops_triton.targets import TARGETS, shared_memory
from attnops_triton.tuned import MeasuredTime

if TYPE_CHECKING:
    from attnops.typing import Function, PyTree

_NAMES: Final = dict(
    zip(("attnops_flash_forward", "attnops_flash_backward_query", "attnops_flash_backward_key"), KERNELS, strict=True)
)
# Tokens and features (heads times head dim) of a tuned call.
_TOKENS: Final = 16384
_WIDTH: Final = 2048
# Seconds that a measurement should last at least.
_SHORTEST: Final = 0.02


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """A call that is tuned: plain or causal, with the batch and heads of a training step.

    Attributes:
        dtype: the dtype of query, key and value.
        head_dim: D and Dv.
        length: T and S.
        mask: "full" or "causal".
    """

    dtype: str
    head_dim: int
    length: int
    mask: str

    @property
    def array(self) -> jax.ShapeDtypeStruct:
        """Query, key and value."""
        B, H = max(1, _TOKENS // self.length), max(1, _WIDTH // self.head_dim)
        return jax.ShapeDtypeStruct((B, self.length, H, self.head_dim), jnp.dtype(self.dtype))

    def call(self, name: str) -> Function:
        """A function that calls the operation, and raises if the operation does not support the call."""
        operation: Any = OperationRegistry.create(name, OperationMetadata(platform="cuda", on_unsupported="error"))
        mask = Causal() if self.mask == "causal" else None
        return lambda *qkv: operation(*qkv, mask=mask).attention_outputs


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A kernel compiled with some tile sizes.

    Attributes:
        kernel: one of `KERNELS`.
        tiles: its tiles.
        binary: its machine code.
    """

    kernel: str
    tiles: TileSizes
    binary: Binary


def neighbours(tiles: TileSizes) -> list[TileSizes]:
    """``tiles``, and tiles that differ from them by a step in one size."""
    bq, bk, warps, stages = tiles.numbers[:4]
    if tiles.specialised:
        return [dataclasses.replace(tiles, stages=n) for n in (stages, stages - 1, stages + 1) if n > 1]
    changed = [
        (bq // 2, bk, warps, stages), (2 * bq, bk, warps, stages), (bq, bk // 2, warps, stages),
        (bq, 2 * bk, warps, stages), (bq, bk, 12 - warps, stages), (bq, bk, warps, stages - 1),
        (bq, bk, warps, stages + 1),
    ]  # fmt: skip
    return [
        tiles,
        *(TileSizes(*x) for x in changed if min(x[:2]) >= 16 and x[0] * x[1] <= 128 * 128 and 1 <= x[3] <= 4),
    ]


def candidates(shape: TunedCall, arch: str) -> Iterator[CompiledCandidate]:
    """Tiles near the table's that fit the shared memory of an architecture and spill no more than the table's."""
    row = choose(arch, shape.dtype, shape.head_dim, None, None)
    for kernel, tiles in zip(KERNELS, row, strict=False):
        allowed: int | None = None
        special = specialised_rows(arch).get(shape.head_dim, {}) if shape.dtype != "float32" else {}
        special_tiles = special.get(KERNELS.index(kernel))
        for candidate in (*neighbours(tiles), *(neighbours(special_tiles) if special_tiles else ())):
            with trying(kernel, candidate):
                (launched,) = (
                    x for x in kernels(_both(shape.call("attnops-triton:flash")), (shape.array,) * 3, arch)
                    if _NAMES[x.recipe.kernel.name] == kernel
                )  # fmt: skip
            binary = compile_for(launched, arch)
            allowed = binary.spilled if allowed is None else allowed
            if binary.shared <= shared_memory(arch) and binary.spilled <= allowed:
                yield CompiledCandidate(kernel, candidate, binary)


def run(
    dtypes: list[str], head_dims: list[int], lengths: list[int], masks: list[str], output: Path | None,
    merge: list[Path], dry: str, report: Callable[[str], None],
) -> None:  # fmt: skip
    """Time tile sizes on this machine's GPU, and write a table that `attnops_triton.tuned` reads.

    Args:
        dtypes: the dtypes of query, key and value.
        head_dims: D and Dv.
        lengths: T and S.
        masks: "full" or "causal".
        output: the table to write; if it exists, its rows are kept.
        merge: tables whose rows are added; if there are any, nothing is timed.
        dry: an architecture, such as ``"sm_90"``: compile for it, and time nothing.
        report: is called with lines of text.

    Raises:
        ValueError: there is no GPU, a file is not a table, or the architecture is unknown.
    """
    if dry and dry not in TARGETS:
        raise ValueError(f"dry={dry!r} is unknown; use one of {list(TARGETS)}")
    shapes = [TunedCall(*given) for given in itertools.product(dtypes, head_dims, lengths, masks)]
    if dry:
        for shape in shapes:
            for candidate in candidates(shape, dry):
                binary = candidate.binary
                report(
                    f"{shape}: {candidate.kernel} {candidate.tiles}: {binary.registers} registers, "
                    f"{binary.spilled} spilled, {binary.shared} bytes of shared memory, "
                    f"{sum(binary.loop.values())} instructions per tile"
                )
        return
    rows = [row for path in merge for row in tuned.read(path)]
    if not merge:
        if device_arch() not in TARGETS:
            raise ValueError(
                f"tuning needs one of the GPUs {list(TARGETS)}, but this machine has {device_arch() or 'none'}; "
                "dry compiles without one"
            )
        rows += tune(shapes, report)
    if output is not None:
        kept = tuned.read(output) if output.is_file() else []
        tuned.write(output, [*kept, *rows])
        report(f"{output}: {len(tuned.read(output))} rows; {tuned.VARIABLE}={output} makes attnops-triton read it")


def tune(shapes: Iterable[TunedCall], report: Callable[[str], None]) -> list[MeasuredTime]:
    """The times of candidates and of calls on this machine's GPU. The rows have the fastest candidate of each kernel.

    Args:
        shapes: the calls that are tuned.
        report: is called with a line for each time.
    """
    device, arch, rows = device_name(), device_arch(), []
    for shape in shapes:
        fields = (shape.dtype, shape.head_dim, shape.head_dim, shape.mask, shape.length)
        timed: list[tuple[str, tuple[int, ...], float]] = []
        for candidate in candidates(shape, arch):
            with trying(candidate.kernel, candidate.tiles):
                seconds = _seconds(_only(candidate.kernel, shape.call("attnops-triton:flash")), shape)
            timed.append((candidate.kernel, candidate.tiles.numbers, seconds))
            report(f"{shape}: {candidate.kernel} {candidate.tiles}: {1e3 * seconds:.3f} ms")
        best = {kernel: min((s, t) for k, t, s in timed if k == kernel) for kernel in KERNELS}
        rows += [MeasuredTime(device, kernel, *fields, tiles, seconds) for kernel, (seconds, tiles) in best.items()]
        for names in (CALLS, CUDNN_CALLS):
            for backward, what in names.items():
                call = shape.call(what.split(",")[0])
                try:
                    seconds = _seconds(_both(call) if backward else call, shape)
                except UnsupportedError:
                    continue
                rows.append(MeasuredTime(device, what, *fields, (), seconds))
                report(f"{shape}: {what}: {1e3 * seconds:.3f} ms")
    return rows


def _both(call: Function) -> Function:
    def run(*qkv: jax.Array) -> PyTree:
        out, pull_back = jax.vjp(call, *qkv)
        return out, pull_back(out)

    return run


def _only(kernel: str, call: Function) -> Function:
    """A program that runs the forward kernel and one of the two backward kernels; XLA removes the other."""
    if kernel == "forward":
        return call
    wanted = slice(0, 1) if kernel == "by_query" else slice(1, 3)
    return lambda *qkv: _both(call)(*qkv)[1][wanted]


def _seconds(function: Function, shape: TunedCall) -> float:
    """The shortest time of a call, in seconds; several calls are queued for each measurement."""
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(key, shape.array.shape, shape.array.dtype) for key in keys]
    run = functools.partial(jax.jit(function), *qkv)
    jax.block_until_ready(run())
    once = _queue(run, 2) / 2
    calls = max(2, round(_SHORTEST / once))
    return min(_queue(run, calls) for _ in range(5)) / calls


def _queue(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        results = run()
    jax.block_until_ready(results)
    return time.perf_counter() - start
