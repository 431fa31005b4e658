"""`attnops serve`: the server of the language model."""
