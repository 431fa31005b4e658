"""Masks by slot of a cache, and those of packed rows."""

from attnops_caches.masks.packed import OfRows, Packed, PackedByRow, by_query
from attnops_caches.masks.slots import AtSlots, Held, Slots, without_table

__all__ = ["AtSlots", "Held", "OfRows", "Packed", "PackedByRow", "Slots", "by_query", "without_table"]
