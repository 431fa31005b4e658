"""Sentence embeddings: all-MiniLM-L6-v2 in JAX, with attnops' attention."""
