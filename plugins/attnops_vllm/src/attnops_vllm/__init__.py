"""attnops' attention inside vLLM's engine for TPUs: ``vllm serve MODEL --attention-backend attnops``.

vLLM finds `register` by an entry point of the group ``vllm.general_plugins`` and runs it in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnops_vllm._version import __version__

if TYPE_CHECKING:
    from attnops_vllm.backend import EngineAttention

__all__ = ["NAME", "__version__", "create", "register"]

# The value of ``--attention-backend``.
NAME: Final = "attnops"


def register() -> None:
    """Make `NAME` an attention backend of tpu-inference; again in one process, it changes nothing."""
    from tpu_inference.layers.common.attention_backend import register_attention_backend

    register_attention_backend(NAME, attention=create, vllm_backend="attnops_vllm.layers.AttnopsBackend")


def create(soft_cap: float | None = None) -> EngineAttention:
    """The backend, for the model runner and for each attention layer.

    Args:
        soft_cap: the soft cap of calls that give none; None for none.

    Raises:
        UnsupportedError: the engine's configuration has what the backend can't serve, see `attnops_vllm.refusals`.
    """
    from attnops_vllm.backend import EngineAttention
    from attnops_vllm.refusals import check_engine

    check_engine()
    return EngineAttention(soft_cap=soft_cap)
