"""Caches of keys and values."""

from attnops.caches.pool import PagePool

__all__ = ["PagePool"]
