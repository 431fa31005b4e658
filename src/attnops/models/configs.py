"""Reading models' configs: objects or mappings, such as Hugging Face transformers' ``PretrainedConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["read", "text_config"]


def read(config: object, *names: str) -> Any:
    """The value of the first of ``names`` that a config (an object or a mapping) has and that is not None."""
    values = (config.get(n) if isinstance(config, Mapping) else getattr(config, n, None) for n in names)
    return next((value for value in values if value is not None), None)


def text_config(config: object) -> Any:
    """The config of the language model within a multimodal one: its ``text_config``; any other config unchanged.

    Raises:
        ValueError: the config has several and its ``get_text_config()`` can't choose.
    """
    nested = read(config, "text_config")
    if nested is not None:
        return nested
    choose = getattr(config, "get_text_config", None)
    if not callable(choose):
        return config
    try:
        return choose()
    except ValueError as error:
        raise ValueError(
            f"{type(config).__name__} has several text configs: {error}; pass the one that configures the attention"
        ) from error
