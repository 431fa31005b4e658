"""The kernels over caches, functions in Triton's language."""
