"""A small transformer in JAX that decodes over every kind of cache; its attention made by attnops."""
