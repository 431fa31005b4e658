"""Tile sizes: one table."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attnops import OperationMetadata


class Tiles(NamedTuple):
    """See `attnops_tpu.plan.Plan`."""

    bq: int
    bk: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    span: int
    vmem: int


def choose(metadata: OperationMetadata, shape: tuple[int, int, int, int, int], dtype: Any) -> Tiles:
    T, S, G, D, Dv = shape
    q, k = metadata.block_q or 1024, metadata.block_k or 1024
    multiple = 8 if metadata.interpret else 128
    bq, bk = (min(b, -(-n // multiple) * multiple) for b, n in ((q, T), (k, S)))
    part = lambda n: math.gcd(n, 256) if n % 128 == 0 else n
    return Tiles(bq, bk, (part(bk), part(bq)), (part(bk), part(bq)), span=max(1, 4096 // bq), vmem=48 << 20)
