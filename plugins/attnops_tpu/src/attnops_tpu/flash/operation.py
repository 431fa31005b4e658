"""FlashAttention for TPUs: the operation and its limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Unpack

import jax

from attnops import AttentionRequest, FlashOptions, Limits, OperationMetadata, OperationOutput, Reason, Request
from attnops.kernels import FlashBackend
from attnops.operations.flash import FlashAttention
from attnops_caches import slots_of_row
from attnops_tpu.caches.reader import TPUCacheReader
from attnops_tpu.flash.primitives import PRIMITIVES
from attnops_tpu.flash.tile_sizes import LARGEST, MAX_TILES
from attnops_tpu.generations import bounds_checks, generation


class TPUFlashAttention(FlashAttention):
    """Attention tile by tile in a Pallas kernel: O(T + S) memory, forward and backward; EMPTY tiles cost nothing.

    Serves TPUs; on other platforms, and for requests that it refuses, the core's native forward runs.
    ``metadata.interpret`` runs the kernel in Pallas's interpreter on the host.

    Reverse mode is a kernel; forward mode and derivatives of higher order run in plain JAX.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "tpu": Limits(
            dtypes=frozenset({"float32", "bfloat16"}),
            max_head_dim=576,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition", "ScoreFn"}),
            mask_primitives=PRIMITIVES,
            bias_primitives=PRIMITIVES,
        )
    }

    readers: ClassVar[Mapping[str, object]] = {"tpu": TPUCacheReader()}

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        if (self.metadata.platform or self.current_backend()) == "tpu":
            # Now, and not in the first call, which may be traced: from JAX 0.12 on Pallas makes contexts of its own,
            # and functions that were traced before are traced again.
            import jax.experimental.pallas.tpu  # noqa: F401

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        if not isinstance(request, AttentionRequest):
            return
        multiple, why = (8, "the sublanes") if request.interpret else (128, "the lanes")
        for name, length in (("block_q", request.query_length), ("block_k", slots_of_row(request))):
            block = getattr(self.metadata, name)
            if block is not None and block % multiple:
                yield Reason(name, block, f"must be a multiple of {multiple}, {why} of a vector register",
                             "leave it out for the table's")  # fmt: skip
            elif length > MAX_TILES * (block or LARGEST):
                yield Reason(name, block, f"{length} tokens are more than {MAX_TILES} such tiles",
                             "leave it out for the table's, or shard the sequence")  # fmt: skip

    def environment_key(self) -> Hashable:
        """See `attnops.BaseOperation.environment_key`: whether kernels have bounds checks, and on how many cores."""
        return super().environment_key(), bounds_checks(), generation().cores

    def forward_tpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[FlashOptions]
    ) -> OperationOutput:
        """See `attnops.OperationImpl.__call__`."""
        return self.run_backend("tpu", query, key, value, **options)

    def backend(self, forward: str) -> FlashBackend | None:
        """See `attnops.operations.flash.FlashAttention.backend`."""
        if forward != "tpu":
            return super().backend(forward)
        # Pallas is imported here, so that the plugin can be listed on machines without its requirements.
        from attnops_tpu.flash.backend import PallasFlash

        return PallasFlash()
