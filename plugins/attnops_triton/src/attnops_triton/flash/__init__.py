"""`flash` over arrays of keys and values, tile by tile."""
