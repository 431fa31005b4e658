"""Attention over caches in one Pallas kernel: tiles of keys are transferred from where the cache holds them."""
