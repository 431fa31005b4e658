"""What is static about a call of linear attention: `LinearPlan`; kernels' code depends on its `LinearOptions` alone."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata
from attnops_linear.chunks import FEW
from attnops_triton.flash.plan import cdiv
from attnops_triton.language.compat import device_arch
from attnops_triton.targets import SHARED_MEMORY, TENSOR_MEMORY, current, is_amd, known, multiprocessors

# Tokens of the blocks whose inverses are found by substitution; the smallest side of a product.
BLOCK: Final = 16
# bfloat16 operands whose sum stands for a float32 operand, by precision; 3 otherwise.
_PARTS: Final[dict[Any, int]] = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2}


@dataclasses.dataclass(frozen=True)
class LinearTiles:
    """How a kernel is compiled.

    Attributes:
        C: tokens of a chunk, a power of two of at least 16 and at most 64, over which sums of decays are exact.
        columns: of values that a program computes, a power of two of at least 16.
        warps: per program.
        stages: of the software pipeline.
        registers: the most registers per thread; 0 leaves the number to the assembler.
        features: of queries and keys whose gradients a program has at once, a power of two of at least 16.
    """

    C: int
    columns: int
    warps: int
    stages: int
    registers: int = 0
    features: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """The third parameter of kernels, a `tl.constexpr`. It has no lengths, so that one program serves all of them."""

    H: int  # value heads
    K: int  # key heads
    D: int  # head dim of keys
    Dv: int  # head dim of values
    T: int = 0  # tokens, in the kernel of few of them
    tiles: LinearTiles
    decay: str  # "none", "constant" [H], "head" [B, T, H] or "channel" [B, T, H, D]
    resets: bool  # whether a flag may say that a token begins a segment
    is_even: bool  # whether all tokens of all chunks are there, and none is padding
    dtype: str  # of products' operands, "bfloat16" or "float32"
    parts: int  # bfloat16 operands whose sum stands for a float32 operand
    emulated: bool  # whether bfloat16 operands are float32 numbers that are rounded to it, as the interpreter needs
    precision: str | None  # of products of float32
    solving: str | None  # of the products that invert matrices
    scale: float  # of queries
    backward: bool = False  # whether the kernels are those of reverse mode

    @property
    def operand(self) -> Any:
        """Triton's dtype of products' operands."""
        import triton.language as tl

        return tl.bfloat16 if self.dtype == "bfloat16" and not self.emulated else tl.float32

    @property
    def stored(self) -> Any:
        """JAX's dtype of operands in memory: the interpreter has no bfloat16."""
        return jnp.dtype(jnp.bfloat16 if self.dtype == "bfloat16" and not self.emulated else jnp.float32)

    @property
    def G(self) -> int:
        """Value heads per key head."""
        return self.H // self.K

    @property
    def blocks(self) -> int:
        """Blocks of 16 tokens of a chunk."""
        return self.tiles.C // BLOCK

    @property
    def width(self) -> int:
        """The head dim of keys as a power of two of at least 16."""
        return max(16, 1 << (self.D - 1).bit_length())

    @property
    def piece(self) -> int:
        """Features that a product of the kernel of scores has at once."""
        return min(32, self.width)

    @property
    def gates(self) -> int:
        """The rows of a chunk's gates: the products of decays from its start up to a token, and after the token up to
        the chunk's end, times beta. Backward also the latter without beta, and the three of `Sums`.
        """
        return 6 if self.backward and self.gated else 2

    @property
    def gated(self) -> bool:
        """Whether anything of a state is lost from token to token."""
        return self.decay != "none" or self.resets


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearPlan(LinearOptions):
    """The options of a call's kernels, and what their code does not depend on; hashable.

    Attributes:
        B: rows.
        length: tokens of a row.
        out_dtype: of outputs.
        scores: how the kernel is compiled that computes what needs no state; its ``columns`` are not used.
        gradients: how the kernel of a chunk's gradients is compiled.
        arch: the architecture to compile for; empty for this machine's GPU.
        interpret: whether kernels run in Triton's interpreter.
        keeps: whether the forward kernel keeps what reverse mode needs.
    """

    B: int
    length: int
    out_dtype: str
    scores: LinearTiles
    gradients: LinearTiles
    arch: str = ""
    interpret: bool = False
    keeps: bool = False

    @property
    def reverse(self) -> LinearTiles:
        """How the kernel of the state's gradient is compiled."""
        # On gfx942 the float32 scores and inverses of two chunks exceed shared memory.
        if self.parts > 1 and is_amd(self.arch) and SHARED_MEMORY[known(self.arch)] <= 64 << 10:
            return dataclasses.replace(self.tiles, stages=1)
        # Two warps have registers for no more.
        return dataclasses.replace(self.tiles, columns=16) if known(self.arch) in TENSOR_MEMORY else self.tiles

    def options(self, tiles: LinearTiles) -> LinearOptions:
        """The options of the kernel that is compiled with ``tiles``."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(LinearOptions)}
        return LinearOptions(**fields | {"tiles": tiles})


def make_plan(
    metadata: OperationMetadata, query: jax.Array, value: jax.Array, dtype: str, decay: jax.Array | None,
    scale: float | None, resets: bool, pads: bool,
) -> LinearPlan:  # fmt: skip
    """The plan of a call.

    Args:
        metadata: of the operation.
        query: [B, T, K, D].
        value: [B, T, H, Dv].
        dtype: the common dtype of query, key and value.
        decay: None, [H], [B, T, H] or [B, T, H, D].
        scale: of queries; None for ``D ** -0.5``.
        resets: whether tokens may begin segments.
        pads: whether tokens may be padding.
    """
    (B, T, K, D), (H, Dv) = query.shape, value.shape[2:]
    arch = "" if metadata.interpret else current() or device_arch()
    parts = _PARTS.get(metadata.precision, 3) if dtype == "bfloat16" else 1
    # Of AMD's GPUs only gfx942 has TF32.
    rough = metadata.precision == lax.Precision.DEFAULT and not is_amd(arch)
    tiles, scores, gradients = choose(arch, dtype, D, Dv, B * H)
    solving = "tf32" if rough else "tf32x3" if parts == 2 and not is_amd(arch) else "ieee"
    return LinearPlan(
        B=B, length=T, H=H, K=K, D=D, Dv=Dv, T=T if T <= FEW else 0, tiles=tiles, scores=scores,
        gradients=gradients,
        decay={None: "none", 1: "constant", 3: "head", 4: "channel"}[None if decay is None else decay.ndim],
        resets=resets, is_even=T % tiles.C == 0 and not pads, dtype=dtype, out_dtype=query.dtype.name, parts=parts,
        emulated=metadata.interpret and dtype == "bfloat16",
        precision=None if dtype == "bfloat16" else "tf32" if rough else "ieee", solving=solving,
        scale=D**-0.5 if scale is None else float(scale), arch=arch, interpret=metadata.interpret,
    )  # fmt: skip


def choose(arch: str, dtype: str, D: int, Dv: int, states: int) -> tuple[LinearTiles, LinearTiles, LinearTiles]:
    """How the kernels of states, of scores and of a chunk's gradients are compiled.

    Programs of states have the most columns of values that leave no multiprocessor idle, since each reads the keys and
    queries of all tokens.

    Args:
        arch: the architecture; empty in the interpreter.
        dtype: of products' operands.
        D: the head dim of keys.
        Dv: the head dim of values.
        states: rows times value heads.
    """
    wide, amd, room = dtype == "float32", is_amd(arch), SHARED_MEMORY[known(arch)]
    # Shared memory holds keys, queries, scores and inverse of a chunk, and of the next one, which is being loaded.
    small = room < 128 << 10
    C = 64 // (1 + wide) // (1 + (D > 128 and small))
    most = 16 if wide or D > 128 or (amd and small) else 32 if small else 64
    columns = next((x for x in (64, 32) if x <= most and states * cdiv(Dv, x) >= multiprocessors(arch)), 16)
    columns = min(columns, max(16, 1 << (Dv - 1).bit_length()))
    # With four warps, products are in tensor memory on Blackwell; Triton before 3.8 has a race there if one is added to
    # from turn to turn of a loop (flash-linear-attention's `chunk_delta_h.py`).
    warps = 2 if known(arch) in TENSOR_MEMORY else 8 if not amd and (wide or D > 128) else 4
    # A program of gradients has all features and columns, some at a time. Only products of 64 rows have wgmma.
    most = 64 if not wide and (amd or known(arch) == "sm_90") else 32
    features, at_once = (min(most, max(16, 1 << (x - 1).bit_length())) for x in (D, Dv))
    gradients = LinearTiles(C, at_once, warps if wide else min(warps, 4), 1 if wide or amd else 2, features=features)
    # Where a program needs more registers than there are, assemblers may leave it 32, unless it is told how many.
    registers = 255 if D > 128 and not amd else 0
    return LinearTiles(C, columns, warps, 1 if wide else 2, registers), LinearTiles(C, 16, 1, 1), gradients
