"""The core's native `flash` over caches, in place."""
