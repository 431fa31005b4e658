"""FlashAttention for GPUs: the operation and its limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Final, Unpack

import jax

from attnops import AttentionRequest, FlashOptions, Limits, OperationOutput, Rank, RankBetween, Reason, Request
from attnops.kernels import FlashBackend
from attnops.operations.flash import FlashAttention
from attnops_triton.caches.reader import TritonCacheReader
from attnops_triton.language.translate import PRIMITIVES
from attnops_triton.versions import missing

# The most scores that a program holds: the metadata's block_q · block_k may not exceed it.
LARGEST: Final = 128 * 128
# The combinations of dtypes for which products have 16-bit operands; others use float32.
_SIXTEEN_BITS: Final = ({"bfloat16"}, {"float16"})


class TritonFlashAttention(FlashAttention):
    """Attention tile by tile in Triton kernels: O(T + S) memory, forward and backward; EMPTY tiles cost nothing.

    Serves NVIDIA and AMD GPUs; on other platforms, and for requests that it refuses, the core's native forward runs.
    ``metadata.interpret`` runs the kernels in Triton's interpreter on the host, in float32 and float16. A second
    derivative is refused.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "gpu": Limits(
            max_head_dim=576,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition", "ScoreFn"}),
            bias_primitives=PRIMITIVES,
        )
    }

    readers: ClassVar[Mapping[str, object]] = {"gpu": TritonCacheReader()}

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        """The rank: above cuDNN if cuDNN would need an array of T × S elements, otherwise below it.

        A table of `attnops tune` replaces this rule by measured times. The rule is about memory: an array mask of
        16,384 × 16,384 needs 512 MB in bfloat16, is read for every head if it varies by head, and lets cuDNN skip no
        tile. For plain and causal attention cuDNN is preferred.
        """
        if request.platform != "cuda" or not isinstance(request, AttentionRequest):
            return super().rank(request)
        from attnops_triton.flash.measured import is_faster_than_cudnn

        faster = is_faster_than_cudnn(request)
        if faster is not None:
            return Rank.MEASURED if faster else Rank.KERNEL
        is_plain = request.mask_kinds <= {"Causal"} and request.query_length == request.key_length
        return Rank.TILED_KERNEL if request.bias_kind or (request.mask_kinds and not is_plain) else Rank.KERNEL

    def environment_key(self) -> Hashable:
        """What traces depend on besides the arguments: target, measured tiles, order of sums, and number of splits."""
        from attnops_triton.caches.tile_sizes import current_splits
        from attnops_triton.flash.measured import environment
        from attnops_triton.flash.order import is_unordered
        from attnops_triton.targets import current

        return current(), environment(), is_unordered(), current_splits()

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """Yields the reasons why these kernels can't serve a request: versions, the GPU, and tile sizes."""
        yield from missing(request.interpret)
        if not request.interpret:
            yield from gpu_reasons(request)
        for name in ("block_q", "block_k"):
            block = getattr(self.metadata, name)
            if block is not None and (block < 16 or block & (block - 1)):
                yield Reason(name, block, "must be a power of two of at least 16", "leave it out for the table's")
        area = (self.metadata.block_q or 64) * (self.metadata.block_k or 64)
        if area > LARGEST:
            yield Reason("block_q · block_k", area, f"must be at most {LARGEST}, the scores that a program can hold",
                         "leave them out for the table's")  # fmt: skip
        over_arrays = isinstance(request, AttentionRequest) and request.source is None
        if over_arrays and request.interpret and request.dtypes[0] == "bfloat16":
            yield Reason("query.dtype", "bfloat16", "Triton's interpreter computes it wrongly",
                         "interpret float32 or float16")  # fmt: skip

    def details(self, request: Request) -> Iterable[str]:
        """Which kernels serve the forward and the backward pass, and what `FlashAttention.details` says."""
        if isinstance(request, AttentionRequest) and request.source is None:
            from attnops_triton.flash.specialised import describe_kernels

            yield describe_kernels(request, self.metadata)
            yield from super().details(request)

    def forward_gpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[FlashOptions]
    ) -> OperationOutput:
        """Runs the Triton kernels. Arguments and output are those of `attnops.OperationImpl.__call__`."""
        return self.run_backend("gpu", query, key, value, **options)

    def backend(self, forward: str) -> FlashBackend | None:
        """The Triton backend for the forward "gpu"; the core's backends for the others."""
        if forward != "gpu":
            return super().backend(forward)
        # Triton is imported here, so that the plugin can be listed on machines without it.
        from attnops_triton.flash.backend import TritonFlash

        return TritonFlash()


def gpu_reasons(request: Request) -> Iterable[Reason]:
    """Reasons why kernels can't run on the GPU that they would be compiled for, if there is one."""
    from attnops_triton.language import assembler
    from attnops_triton.language.compat import device_arch
    from attnops_triton.targets import CDNA, SHARED_MEMORY, current, is_amd, known

    arch = current() or device_arch()
    if is_amd(arch) and arch not in CDNA:
        yield Reason("GPU", arch, f"must be one of {', '.join(CDNA)}, whose matrix instructions the kernels use")
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < 80:
        yield Reason("GPU", arch, "must be at least sm_80, whose products and memory the kernels are written for")
        return
    if arch.startswith("sm_") and not current():
        yield from assembler.reasons(arch)
    # Calls over a cache have smaller tiles.
    is_plain = isinstance(request, AttentionRequest) and request.source is None
    if arch.startswith("sm_") and is_plain and set(request.dtypes) not in _SIXTEEN_BITS:
        # Operands of float32 products are in shared memory: tiles of 16 tokens of query, key, value and output.
        assert isinstance(request, AttentionRequest)
        least, most = 4 * 16 * 2 * (request.head_dim + request.value_head_dim), SHARED_MEMORY[known(arch)]
        if least > most:
            yield Reason("head_dim", request.head_dim, f"the smallest tiles in float32 need {least} bytes of shared "
                         f"memory, and {arch} has {most}", "cast query, key and value to bfloat16")  # fmt: skip
