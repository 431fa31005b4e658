"""Attention of keys and values that are at hand, tile by tile: `flash`."""
