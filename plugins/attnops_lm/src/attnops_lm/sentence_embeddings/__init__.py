"""Sentence embeddings: all-MiniLM-L6-v2 in JAX, its attention made by attnops."""
