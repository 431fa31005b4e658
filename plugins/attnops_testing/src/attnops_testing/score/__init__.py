"""`attnops score`: which attention of other libraries computes what, each in an environment of its own."""
