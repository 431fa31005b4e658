"""Stored 8-bit numbers as operands of products, as Triton source.

float16 holds each of them exactly, so that operands are float16 whatever the query's dtype, unless that is float32.
Stores hold the bits of floats. A stored NaN is none, see `attnops.caches.Quantized`.
"""

from __future__ import annotations

from attnops_triton.language.source import Writer


def decode(write: Writer, name: str, stored: str, dtype: str) -> None:
    """Write ``name``, loaded 8-bit numbers, as numbers of ``dtype``.

    Args:
        write: the kernel's lines.
        name: of the variable.
        stored: the name of the stored dtype.
        dtype: of operands.
    """
    if stored == "int8":
        write(f"{name} = {name}.to(tl.{dtype})")
        return
    if stored == "float8_e5m2":
        # The upper half of a float16.
        write(f"{name} = ({name}.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.{dtype})")
        return
    # A float16 has one more bit of exponent: its bias is larger by 8.
    write(
        f"{name} = {name}.to(tl.uint16)",
        f"{name} = (({name} & 0x80) << 8 | ({name} & 0x7f) << 7).to(tl.float16, bitcast=True)",
        f"{name} = ({name} * tl.full([1, 1], 256.0, tl.float16)).to(tl.{dtype})",
    )
