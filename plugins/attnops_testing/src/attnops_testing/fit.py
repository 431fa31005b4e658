"""Problems that fit a kernel: the dtype, lengths, heads and head dims of the plain problem that it serves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from attnops.dispatch.request import AttentionRequest
from attnops.errors import Reason

# Requirements of kernels, in the order in which they are tried: the smallest first.
MULTIPLES: Final = (1, 16, 64, 128, 256, 512)
HEAD_DIMS: Final = (16, 32, 64, 128, 256)
HEADS: Final = (4, 8, 16, 1)
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The plain problem of a kernel.

    Attributes:
        block: queries, and keys, per tile.
        multiple: lengths must be multiples of it.
        tiles: whole tiles of queries, and of keys. Lengths are half a tile more, rounded down to a multiple of
            ``multiple``.
        B: batch.
        H: heads, as many as kv heads.
        D: head_dim of query, key and value.
        dtype: the dtype of query, key and value.
        own_tiles: whether the kernel chooses its tiles; otherwise the metadata states ``block``.
    """

    block: int = 16
    multiple: int = 1
    tiles: int = 2
    B: int = 2
    H: int = 4
    D: int = 16
    dtype: str = "float32"
    own_tiles: bool = False

    def tokens(self, tiles: int, more: float) -> int:
        """The length of ``tiles`` tiles and ``more``: a number of tokens (an int), or a fraction of a tile, for which
        the length is rounded down to a multiple of ``multiple``.
        """
        if isinstance(more, int):
            return tiles * self.block + more
        return max(self.multiple, int((tiles + more) * self.block) // self.multiple * self.multiple)


def find_fit(
    reasons: Callable[[AttentionRequest], Iterable[Reason]], plain: AttentionRequest, block: int, dtypes: Iterable[str],
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Fit:  # fmt: skip
    """The first problem that a kernel does not refuse; the smallest one if it refuses all.

    Args:
        reasons: why the kernel refuses a request.
        plain: the request of a call of any shape, without options.
        block: the fewest queries, and keys, per tile.
        dtypes: the dtypes to try, the preferred one first.
        head_dims: the head dims to try.
    """
    for fit in _candidates(block, dtypes, head_dims):
        # The longest and the shortest length of the suite: a kernel may serve 128 and refuse 64.
        lengths = fit.tokens(2, 0.5), fit.tokens(1, 0.35)
        requests = (
            plain.replace(
                batch=fit.B, query_length=T, key_length=T, heads=fit.H, kv_heads=fit.H, head_dim=fit.D,
                value_head_dim=fit.D, dtypes=(fit.dtype,) * 3,
            )
            for T in lengths
        )  # fmt: skip
        if not any(list(reasons(request)) for request in requests):
            return fit
    return Fit(block=block, D=head_dims[0])


def _candidates(block: int, dtypes: Iterable[str], head_dims: Iterable[int]) -> Iterator[Fit]:
    for dtype, H, multiple, D in itertools.product(dtypes, HEADS, MULTIPLES, head_dims):
        yield Fit(block=max(block, multiple), multiple=multiple, H=H, D=D, dtype=dtype)
