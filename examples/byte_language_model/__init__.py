"""A byte-level language model in JAX, trained on what ships with Python; its attention made by attnops."""
