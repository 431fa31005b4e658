"""Stored numbers of 8 or 4 bits as operands of products, and new tokens as such numbers.

float16 represents each of them exactly, so that operands are float16 for every query dtype but float32. Stores hold
8-bit floats as integers with the same bits. None of them is NaN: for a NaN `attnops_caches.Quantized` stores 0, or a
scale of NaN.

Triton's conversion costs three or more instructions per number. On NVIDIA GPUs the code here converts four at once.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max as largest

from attnops_triton.targets import capability, is_amd

# PTX from four bytes, $2, to two pairs of float16, $0 and $1. int8: 1024 + 128 + x has x in its lowest bits.
_INT8: Final = """{
.reg .b32 u, c;
xor.b32 u, $2, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 $0, u, 0x64646464, 0x5150;
prmt.b32 $1, u, 0x64646464, 0x5352;
sub.f16x2 $0, $0, c;
sub.f16x2 $1, $1, c;
}"""
# int4: the same of the lower 4 bits of each byte, which with the sign bit inverted are x + 8.
_INT4: Final = """{
.reg .b32 u, c;
lop3.b32 u, $2, 0x0f0f0f0f, 0x08080808, 0x6a;
mov.b32 c, 0x64086408;
prmt.b32 $0, u, 0x64646464, 0x5150;
prmt.b32 $1, u, 0x64646464, 0x5352;
sub.f16x2 $0, $0, c;
sub.f16x2 $1, $1, c;
}"""
_INT4_UPPER: Final = _INT4.replace("lop3.b32 u, $2,", "shr.b32 u, $2, 4;\nlop3.b32 u, u,")
# These 8 bits are the upper half of a float16.
_E5M2: Final = """{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}"""
# float16 has one more exponent bit, and its exponent bias is larger by 8.
_E4M3: Final = """{
.reg .b32 a, b, s, t, c;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
mov.b32 c, 0x5c005c00;
shr.b32 s, a, 1;
shr.b32 t, b, 1;
and.b32 s, s, 0x3f803f80;
and.b32 t, t, 0x3f803f80;
lop3.b32 s, a, 0x80008000, s, 0xea;
lop3.b32 t, b, 0x80008000, t, 0xea;
mul.f16x2 $0, s, c;
mul.f16x2 $1, t, c;
}"""
# From sm_90 on one instruction converts two numbers; sm_89 has it only in later versions of PTX.
_E4M3_IN_PAIRS: Final = """{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}"""
_PTX: Final = {
    "int8": (_INT8,), "float8_e5m2": (_E5M2,), "float8_e4m3fn": (_E4M3,), "int4": (_INT4, _INT4_UPPER),
}  # fmt: skip


def assembly(stored: str, dtype: str, arch: str) -> tuple[str, ...] | None:
    """The PTX that converts four stored numbers; then, of int4, those in the upper 4 bits. None: one at a time."""
    if stored not in _PTX or dtype != "float16" or not arch or is_amd(arch):
        return None
    in_pairs = stored == "float8_e4m3fn" and capability(arch) >= 90
    return tuple(text.replace("\n", " ") for text in ((_E4M3_IN_PAIRS,) if in_pairs else _PTX[stored]))


@triton.jit
def decode(x, upper: tl.constexpr, options: tl.constexpr):
    """Loaded numbers as operands; ``upper``: 1 for those in the upper 4 bits, else 0."""
    if options.assembly is not None:
        # Marked impure: otherwise Triton first moves the bytes, one by one, to the operands' layout, and converts after
        # that.
        x = tl.inline_asm_elementwise(options.assembly[upper], "=r,=r,r", [x], tl.float16, False, 4)
    elif options.stored == "int4":
        x = ((x.to(tl.int32) << 28 - 4 * upper) >> 28).to(options.operand)
    elif options.stored == "float8_e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(options.operand)
    elif options.stored == "float8_e4m3fn":
        x = x.to(tl.uint16)
        x = ((x & 0x80) << 8 | (x & 0x7F) << 7).to(tl.float16, bitcast=True)
        x = (x * tl.full([1, 1], 256.0, tl.float16)).to(options.operand)
    else:
        x = x.to(options.operand)
    return x


@triton.jit
def scale_of(new, scale_at, d: tl.constexpr, options: tl.constexpr):
    """The scale of a new token of ``d`` features at the pointer ``new``, as of `attnops_caches.Quantized.encode`.

    It is loaded from ``scale_at`` where scales are by head or tensor.
    """
    if options.by_token:
        column = tl.arange(0, triton.next_power_of_2(d))
        size = tl.abs(tl.load(new + column, mask=column < d, other=0).to(tl.float32))
        scale = tl.reduce(size, 0, largest) * (1.0 / options.largest)
        is_nan = tl.reduce((size != size).to(tl.int32), 0, largest)
        # A denormal scale would lose bits, and its reciprocal is infinite.
        scale = tl.where(scale < 2.0**-126, 0.0, scale)
        scale = tl.where(is_nan != 0, float("nan"), scale)
    else:
        scale = tl.load(scale_at)
    return scale


@triton.jit
def inverse_of(scale):
    """``1 / scale`` in float64, by Newton's method.

    A number of float32 times it, rounded to float32, is the quotient that division gives, whose code needs more
    registers: no quotient is as near to the middle of two numbers as the error.
    """
    is_small = scale < 2.0**-64
    scale = tl.where(is_small, scale * 2.0**64, scale)
    inverse = (1.0 / scale).to(tl.float64)
    inverse = inverse * (2.0 - scale.to(tl.float64) * inverse)
    inverse = inverse * (2.0 - scale.to(tl.float64) * inverse)
    inverse = tl.where(is_small, inverse * 2.0**64, inverse)
    return tl.where(scale == float("inf"), 0.0, inverse)


@triton.jit
def encode(x, scale, options: tl.constexpr):
    """Numbers as they are stored with a scale, as int32."""
    x = tl.where(scale == 0.0, 0.0, (x.to(tl.float64) * inverse_of(scale)).to(tl.float32))
    x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -options.largest), options.largest))
    if options.stored == "int8" or options.stored == "int4":
        # Adding 1.5 · 2^23 rounds half to even.
        code = ((x + 12582912.0) - 12582912.0).to(tl.int32)
    else:
        # The bits of float32 with fewer of the mantissa, rounded half to even, and another exponent bias. Below the
        # least normal number the sum with a power of two has the digits that are stored in its lowest bits.
        mantissa: tl.constexpr = 3 if options.stored == "float8_e4m3fn" else 2
        bias: tl.constexpr = 7 if options.stored == "float8_e4m3fn" else 15
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        normal = bits + (1 << (22 - mantissa)) - 1 + ((bits >> (23 - mantissa)) & 1)
        normal = (normal >> (23 - mantissa)) - ((127 - bias) << mantissa)
        small = size + 2.0 ** (24 - bias - mantissa)
        small = small.to(tl.int32, bitcast=True) - ((151 - bias - mantissa) << 23)
        code = tl.where(size < 2.0 ** (1 - bias), small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code
