"""Caches: the keys and values of earlier tokens, for decoding and for prompts in chunks.

Storage (`DenseCache`, `WindowCache`, `PagedCache`), codec (`Quantized`, or as they are) and content (keys and values,
or a latent) combine freely. Every operation serves every cache: ``op(query, cache, mask=...)``.

Programs with caches among their arguments and results, such as ``op.step``, are serialised by `jax.export`, unless the
cache is on a mesh; a process that loads one imports this module first.
"""

import attnops.output  # noqa: F401  # what a step returns, for programs of `jax.export`
from attnops.caches.base import Cache, Contents, NewTokens
from attnops.caches.codec import Quantized
from attnops.caches.dense import DenseCache
from attnops.caches.packed import Rows
from attnops.caches.paged import PagedCache
from attnops.caches.placement import Placement, sharded
from attnops.caches.pool import PageCopies, PagePool
from attnops.caches.sizes import bytes_per_page, pages_that_fit
from attnops.caches.window import WindowCache

__all__ = [
    "Cache",
    "Contents",
    "DenseCache",
    "NewTokens",
    "PageCopies",
    "PagePool",
    "PagedCache",
    "Placement",
    "Quantized",
    "Rows",
    "WindowCache",
    "bytes_per_page",
    "pages_that_fit",
    "sharded",
]
