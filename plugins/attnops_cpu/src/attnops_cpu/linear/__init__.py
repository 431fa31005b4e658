"""Linear attention: the operation, and the call of its handler."""
