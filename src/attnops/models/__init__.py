"""Helpers for whoever writes a model: heads, rotary embeddings, checkpoint policies, dtypes."""
