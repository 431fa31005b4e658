"""A decoder-only language model in flax.nnx, with attnops' attention, and weights from Hugging Face or GGUF."""

import importlib
from typing import TYPE_CHECKING, Any

from attnops_lm._version import __version__

if TYPE_CHECKING:
    from attnops_lm.config import Config, Experts
    from attnops_lm.model import CausalLM, CausalLMOutput, SequenceClassifier, SequenceClassifierOutput

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "Config",
    "Experts",
    "SequenceClassifier",
    "SequenceClassifierOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Rotary embeddings and the commands' names need no flax.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module(f"attnops_lm.{'config' if name in ('Config', 'Experts') else 'model'}"), name
    )
