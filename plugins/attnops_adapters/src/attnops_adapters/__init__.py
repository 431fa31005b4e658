"""Attention of other frameworks by attnops' operations, in the frameworks' conventions: one module per framework."""

from attnops_adapters._version import __version__

__all__ = ["__version__"]
