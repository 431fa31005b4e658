"""How a checkpoint says that embeddings are pooled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attnops_lm.gguf_file import pooling_of_gguf
from attnops_lm.serve.program import POOLING

# By llama.cpp's number, and by the names of sentence-transformers; older versions have fields with these names.
_GGUF: Final = {1: "mean", 3: "last"}
_NAMES: Final = {
    "lasttoken": "last", "pooling_mode_lasttoken": "last", "mean": "mean", "pooling_mode_mean_tokens": "mean"
}  # fmt: skip
_CHOOSE: Final = f"the server pools by one of {', '.join(POOLING)}; choose with --pooling"
# What the server computes of sentence-transformers' modules.
_MODULES: Final = ("Transformer", "Pooling", "Normalize")


def check_pooling(pooling: str) -> None:
    """Raise `ValueError` for an unknown way."""
    if pooling not in POOLING:
        raise ValueError(f"pooling={pooling!r} must be one of {', '.join(POOLING)}")


def pooling_of(checkpoint: str | None) -> str:
    """How a checkpoint's embeddings are pooled, one of `attnops_lm.serve.program.POOLING`: what a GGUF file, or the
    files of sentence-transformers in a directory say, else "last".

    Raises:
        ValueError: it is another way, a file has another form, or more is computed than the pooled vector's direction.
    """
    path = Path(checkpoint or "")
    if checkpoint is None:
        return "last"
    if path.is_file():
        given = pooling_of_gguf(path)
        if given not in (None, 0, *_GGUF):  # 0 is none
            raise ValueError(f"{path} has pooling_type={given}, but {_CHOOSE}")
        return _GGUF.get(given or 0, "last")
    modules = path / "modules.json"
    if modules.is_file():
        for module in _read(modules, list):
            kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else module
            if kind not in _MODULES:
                raise ValueError(f"{modules} has a module {kind!r}, but the server has only {', '.join(_MODULES)}")
    file = path / "1_Pooling" / "config.json"
    return _of_sentence_transformers(file, _read(file, dict)) if file.is_file() else "last"


def _of_sentence_transformers(file: Path, given: Mapping[str, Any]) -> str:
    ways = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
    if not ways and isinstance(given.get("pooling_mode"), str):
        ways = [given["pooling_mode"]]
    if len(ways) != 1 or ways[0] not in _NAMES:
        raise ValueError(f"{file} has {', '.join(ways) or 'no pooling_mode'}, but {_CHOOSE}")
    if given.get("include_prompt") is False and _NAMES[ways[0]] == "mean":
        raise ValueError(f"{file} has include_prompt=false, but the mean here is of all tokens; choose with --pooling")
    return _NAMES[ways[0]]


def _read(file: Path, kind: type[Any]) -> Any:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{file} is no JSON {'object' if kind is dict else 'list'}")
    return found
