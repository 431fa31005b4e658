"""Calls over caches: how they are described, bound, run and stepped, on one device and on a mesh."""
