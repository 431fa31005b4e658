"""Flash attention: the operation, its backend, and the arguments of its handlers."""
