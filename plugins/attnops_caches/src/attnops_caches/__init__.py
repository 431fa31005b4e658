"""Caches: the keys and values of earlier tokens, for decoding and for prompts in chunks.

Storage (`DenseCache`, `WindowCache`, `PagedCache`), codec (`Quantized`, or as they are) and content (keys and values,
or a latent) combine freely. Every operation serves every cache: ``op(query, cache, mask=...)``.

Programs with caches among their arguments and results, such as ``op.step``, are serialised by `jax.export`, unless the
cache is on a mesh; a process that loads one imports this module first.
"""

import attnops.output  # noqa: F401  # what a step returns, for programs of `jax.export`
from attnops.operations.flash.forward import KeyValue
from attnops_caches._version import __version__
from attnops_caches.base import Cache, Contents
from attnops_caches.calls.reader import CacheLimits, CacheOptions, CacheReader, cache_of, in_place_reasons, step_reasons
from attnops_caches.calls.request import CacheRequest, slots_of_row
from attnops_caches.codec import Quantized
from attnops_caches.dense import DenseCache
from attnops_caches.flash.attention import NativeFlashReader  # which the core's native `flash` then has
from attnops_caches.kivi import KiviCache
from attnops_caches.layout import TokenLayout, TokenOptions
from attnops_caches.paged import PagedCache
from attnops_caches.pending import Pending
from attnops_caches.placement import Placement, sharded
from attnops_caches.pool import PageCopies, PagePool
from attnops_caches.rows import Rows
from attnops_caches.sizes import bytes_per_page, pages_that_fit
from attnops_caches.store import GivenTokens, NewTokens, Pieces
from attnops_caches.stored import StoredCache
from attnops_caches.tiles import TileAt, TileLoader
from attnops_caches.transfer import CacheRows
from attnops_caches.window import WindowCache

__all__ = [
    "Cache",
    "CacheLimits",
    "CacheOptions",
    "CacheReader",
    "CacheRequest",
    "CacheRows",
    "Contents",
    "DenseCache",
    "GivenTokens",
    "KeyValue",
    "KiviCache",
    "NativeFlashReader",
    "NewTokens",
    "PageCopies",
    "PagePool",
    "PagedCache",
    "Pending",
    "Pieces",
    "Placement",
    "Quantized",
    "Rows",
    "StoredCache",
    "TileAt",
    "TileLoader",
    "TokenLayout",
    "TokenOptions",
    "WindowCache",
    "__version__",
    "bytes_per_page",
    "cache_of",
    "in_place_reasons",
    "pages_that_fit",
    "sharded",
    "slots_of_row",
    "step_reasons",
]
