"""Flash attention over arrays of keys and values."""
