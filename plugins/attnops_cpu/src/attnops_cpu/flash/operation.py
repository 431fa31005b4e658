"""FlashAttention for processors: the operation and its limits."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Final, Unpack

import jax

from attnops import AttentionRequest, FlashOptions, Limits, OperationOutput, Reason, Request
from attnops.kernels import FlashBackend
from attnops.operations.flash import FlashAttention
from attnops_cpu.caches.reader import CpuCacheReader, kernel_reasons
from attnops_cpu.library import library

# The texts of `details` for calls with few queries: about the forward pass, and about gradients in train mode.
IN_PLACE: Final = "keys and values are read where they lie"
FEW: Final = "few queries of many keys: in plain JAX, as native flash, which does not pack keys and values"
FEW_GRADIENTS: Final = "where it is differentiated: in plain JAX, as native flash, which does not pack keys and values"
PACKED_GRADIENTS: Final = "where it is differentiated: keys and values are packed"


def _are_few(rows: int, keys: int) -> bool:
    """Whether native flash is faster for ``rows`` queries of a kv head, since packing keys costs more than products.

    At a head dim of 128 and 2,048 keys, 4, 16, 32 and 128 queries take 1.9, 1.8, 1.3 and 1.0 times native's time in
    float32 on one core, and less on several, which native uses less well.
    """
    return rows <= 32 and keys >= 128


def _are_in_place(rows: int, keys: int, dropout_prob: float, by_head: bool) -> bool:
    """Whether the kernel over caches, which packs nothing, is fastest for ``rows`` queries of a kv head.

    It has no dropout, and is slower with a mask by head. At a head dim of 128, 8 kv heads and 8,192 keys, native flash
    needs 1.9, 1.4 and 1.1 times its time for 1, 16 and 32 queries in float32 on one core, and 13, 4.7 and 2.2 times in
    bfloat16; with packed keys, 64 queries need 1.2 times its time.
    """
    is_served = not dropout_prob and not by_head and keys < 1 << 31
    return is_served and (rows <= 16 or (rows <= 96 and keys >= 1024))


class CpuFlashAttention(FlashAttention):
    """Attention in C++ kernels: O(T + S) memory, forward and backward; keys that no query of a block sees cost nothing.

    Serves processors; on other platforms, and for requests that it refuses, the core's native forward runs. Results are
    the same to the bit for any number of threads. Kernels evaluate bands and segments. For other masks they read a bit
    per score; XLA computes these for PARTIAL tiles, or for all tiles, T · S / 8 bytes, if the mask is traced. The
    metadata's ``block_q`` and ``block_k`` are the sizes of these tiles; ``block_k`` is rounded up to a multiple of 32.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "cpu": Limits(
            max_head_dim=1024,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition"}),
            interpretable=False,
            exportable=False,
        )
    }

    readers: ClassVar[Mapping[str, object]] = {"cpu": CpuCacheReader()}

    priority: ClassVar[int] = FlashAttention.priority + 1

    def environment_key(self) -> Hashable:
        """What traces depend on besides the arguments: the instruction set."""
        return library().isa

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """The reason why the library can't be used, if it can't."""
        problem = library().problem
        if problem is not None:
            yield problem

    def details(self, request: Request) -> Iterable[str]:
        """Which instruction set serves the call, and what `FlashAttention.details` says."""
        if not isinstance(request, AttentionRequest):
            return
        if request.source is None:
            if library().problem is None:
                rows, keys = request.query_length * (request.heads // request.kv_heads), request.key_length
                few, by_head = _are_few(rows, keys), request.mask_structure.by_head
                in_place = _are_in_place(rows, keys, request.dropout_prob, by_head)
                yield FEW if few and not in_place else f"kernels in C++ for {library().isa}"
                if in_place:
                    yield IN_PLACE
                if in_place and request.needs_grad:
                    yield FEW_GRADIENTS if few else PACKED_GRADIENTS
                if few:
                    return
            yield from super().details(request)
        elif reasons := kernel_reasons(request):
            yield f"in plain JAX, as native flash: {'; '.join(map(str, reasons))}"
        elif library().problem is None:
            yield f"kernels in C++ for {library().isa}"

    def forward_cpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[FlashOptions]
    ) -> OperationOutput:
        """Runs the C++ kernels; arguments and output as in `attnops.OperationImpl.__call__`."""
        (_, T, H, _), (S, K) = query.shape, key.shape[1:3]
        rows, mask = T * (H // K), options.get("mask")
        packed = functools.partial(self.run_backend, "native" if _are_few(rows, S) else "cpu")
        dropout_prob = 0.0 if options.get("dropout_key") is None else self.metadata.dropout_prob
        if not _are_in_place(rows, S, dropout_prob, mask is not None and mask.structure(T, S).by_head):
            return packed(query, key, value, **options)
        from attnops_cpu.flash.in_place import unless_differentiated

        in_place = functools.partial(self.run_backend, "in place")
        return unless_differentiated(in_place, packed, query, key, value, **options)

    def backend(self, forward: str) -> FlashBackend | None:
        """The C++ backends for the forwards "cpu" and "in place"; the core's backends for the others."""
        if forward not in ("cpu", "in place"):
            return super().backend(forward)
        from attnops_cpu.flash.backend import CpuFlash
        from attnops_cpu.flash.in_place import InPlaceFlash

        return CpuFlash() if forward == "cpu" else InPlaceFlash()
