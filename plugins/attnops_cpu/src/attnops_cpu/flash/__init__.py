"""Flash attention: the operation, its backend, and what its handlers are given."""
