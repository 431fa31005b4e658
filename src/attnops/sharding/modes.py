"""Runtime modes: training, prefill, decoding, inserting."""

from __future__ import annotations

from typing import Final, Literal, cast, get_args

RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]

MODE_DECODE: Final = "__autoregressive__"
MODE_PREFILL: Final = "__prefill__"
MODE_TRAIN: Final = "__train__"
MODE_INSERT: Final = "__insert__"

GENERATION_MODES: Final = frozenset({MODE_DECODE, MODE_INSERT})

_PRINTED = {MODE_DECODE: "decode", MODE_PREFILL: "prefill", MODE_TRAIN: "train", MODE_INSERT: "insert"}
_SHORT_NAMES = {"autoregressive": MODE_DECODE} | {short: mode for mode, short in _PRINTED.items()}


def canonicalize_mode(mode: str) -> RUNTIME_MODE_TYPES:
    """The runtime mode that ``mode`` names: a constant of this module, or its short name (``"decode"``).

    Raises:
        ValueError: ``mode`` is not a runtime mode.
    """
    full = _SHORT_NAMES.get(mode, mode) if isinstance(mode, str) else None
    if full not in get_args(RUNTIME_MODE_TYPES):
        raise ValueError(f"mode={mode!r} is not a runtime mode; use one of {sorted(_PRINTED.values())}")
    return cast(RUNTIME_MODE_TYPES, full)


def printed_mode(mode: str) -> str:
    """The short name of a runtime mode, for messages: ``"train"``, ``"decode"``."""
    return _PRINTED.get(mode, mode)
