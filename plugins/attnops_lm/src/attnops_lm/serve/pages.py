"""The bookkeeping of pages, on the host."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import numpy as np


class Pages:
    """Which pages are free, how many rows hold each, and which prefix each contains.

    It is on the host, unlike `attnops_caches.PagePool`: these numbers decide before every step which requests run, and
    reading them from the device would wait for it. The key of a full page is a hash of all tokens up to the end of the
    page. Pages that no row holds keep their contents until they are allocated again.
    """

    def __init__(self, count: int, size: int, sharing: bool = True) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))
        self.unused: dict[int, None] = {}  # held by no row, but with a key; least recently used first
        self.page_of: dict[bytes, int] = {}
        self.content: dict[int, tuple[bytes, bytes, list[int]]] = {}  # page -> key of the pages before, key, tokens
        self.filling: set[int] = set()  # pages that become full in this step
        self.after: dict[bytes, dict[int, None]] = collections.defaultdict(dict)  # key -> pages that come next

    @property
    def available(self) -> int:
        """The number of pages that can be allocated."""
        return len(self.free) + len(self.unused)

    def take(self) -> int:
        """Allocate a page for one row; one must be available."""
        if not self.free:
            page = next(iter(self.unused))
            del self.unused[page]
            before, key, _ = self.content.pop(page)
            del self.page_of[key], self.after[before][page]
            if not self.after[before]:
                del self.after[before]
            self.free.append(page)
        page = self.free.pop()
        self.references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more row that holds a page."""
        self.references[page] += 1
        self.unused.pop(page, None)

    def drop(self, page: int) -> None:
        """Count one row fewer that holds a page."""
        self.references[page] -= 1
        if not self.references[page]:
            if page in self.content:
                self.unused[page] = None
            else:
                self.free.append(page)

    def register(self, before: bytes, tokens: list[int], page: int) -> bytes:
        """Register a page that is now full, and return its key; if several pages have the same key, `find` returns the
        first.
        """
        key = _key(before, tokens)
        self.filling.add(page)
        if self.sharing and key not in self.page_of:
            self.page_of[key], self.content[page] = page, (before, key, tokens)
            self.after[before][page] = None
        return key

    def find(self, tokens: list[int]) -> tuple[list[int], bytes]:
        """Full pages that hold the first of these tokens, and the key of the last page."""
        pages, key = [], b""
        for i in range(len(tokens) // self.size):
            longer = _key(key, tokens[i * self.size : (i + 1) * self.size])
            if longer not in self.page_of:
                break
            key = longer
            pages.append(self.page_of[key])
        return pages, key

    def find_part(self, key: bytes, tokens: list[int]) -> tuple[int, int]:
        """The page after ``key`` that begins with the most of these tokens, and their number; (−1, 0) for none.

        A page can be shared as a whole in the step that fills it, since the step appends all tokens before any attends.
        It can't be copied in that step, since copies are made before it.
        """
        pages = [page for page in self.after.get(key, ()) if page not in self.filling]
        candidates = ((_common(self.content[page][2], tokens), page) for page in pages)
        count, page = max(candidates, default=(0, -1))
        return page, count


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _key(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()
