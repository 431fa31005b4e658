"""Measurements of this machine's GPU, from tables of `attnops_triton.tuned`: the fastest tiles, and the faster
operation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Final

from attnops import AttentionRequest
from attnops.kernels import TraceContext
from attnops_triton import tuned
from attnops_triton.flash.plan import TileSizes
from attnops_triton.language import compat
from attnops_triton.targets import current

# The kernels whose tiles are measured, in the order of `attnops_triton.flash.tile_sizes.KernelTiles`.
KERNELS: Final = ("forward", "by_query", "by_key")
CALLS: Final = {True: "attnops-triton:flash, backward", False: "attnops-triton:flash, forward"}
CUDNN_CALLS: Final = {True: "attnops:sdpa, backward", False: "attnops:sdpa, forward"}

# Part of the key of JAX's cache of traced functions.
_TRIED: TraceContext[tuple[()] | tuple[str, TileSizes]] = TraceContext("attnops-triton:tiles", ())


def environment() -> Hashable:
    """A key of all that `measured_tiles` and `is_faster_than_cudnn` depend on besides the call."""
    return _TRIED.value, os.environ.get(tuned.VARIABLE, "")


@contextlib.contextmanager
def trying(kernel: str, tiles: TileSizes) -> Iterator[None]:
    """A context in which a kernel has these tiles; the other kernels have the table's."""
    with _TRIED((kernel, tiles)):
        yield


def measured_tiles(dtype: str, head_dim: int, value_head_dim: int) -> Mapping[int, TileSizes]:
    """The tiles that were measured to be fastest on this machine's GPU, by index of `KERNELS`; they replace the
    table's.

    Empty inside `attnops_triton.targets.target`.
    """
    tried = _TRIED.value
    if tried:
        return {KERNELS.index(tried[0]): tried[1]}
    if current() or not tuned.installed():
        return {}
    device = compat.device_name()
    fastest = {i: tuned.tiles(device, kernel, dtype, head_dim, value_head_dim) for i, kernel in enumerate(KERNELS)}
    return {i: TileSizes.from_numbers(tiles) for i, tiles in fastest.items() if tiles}


def is_faster_than_cudnn(request: AttentionRequest) -> bool | None:
    """Whether this plugin's kernels are faster than cuDNN for plain or causal attention; None if not measured."""
    is_plain = request.mask_kinds <= {"Causal"} and not request.bias_kind and request.query_length == request.key_length
    if not is_plain or request.head_dim != request.value_head_dim or current() or not tuned.installed():
        return None
    backward = request.needs_grad
    names = (CALLS[backward], CUDNN_CALLS[backward])
    fastest = tuned.fastest(
        compat.device_name(), names, request.dtypes[0], request.head_dim, "causal" if request.mask_kinds else "full",
        request.key_length,
    )  # fmt: skip
    return fastest == names[0] if fastest else None
