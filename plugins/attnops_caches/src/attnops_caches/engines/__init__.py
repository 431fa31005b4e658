"""Attention over an engine's array of pages, for backends of serving engines such as vLLM and SGLang.

The engine owns the array of each layer, [P, 1, K, page, W], and the table of pages; `attend` is one call of a layer.
"""

from __future__ import annotations

from attnops_caches.engines.pages import cache_of_pages, pages_of_cache, pages_shape
from attnops_caches.engines.refusals import refusal
from attnops_caches.engines.rows import Scores, attend, rounded

__all__ = ["Scores", "attend", "cache_of_pages", "pages_of_cache", "pages_shape", "refusal", "rounded"]
