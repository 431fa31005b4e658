"""A byte-level language model in JAX with attnops' attention, trained on the text that ships with Python."""
