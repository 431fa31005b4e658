"""The attention layers of vLLM's PyTorch models: those of tpu-inference, with attnops as their kernel."""

from __future__ import annotations

import functools
from typing import Any, Final

from tpu_inference.layers.common.attention_backend import register_attention_backend
from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend, PallasAttentionBackendImpl

from attnops_vllm import NAME, create

# The class path of what ``--attention-backend attnops`` names.
PATH: Final = f"{__name__}.AttnopsBackend"


class AttnopsBackendImpl(PallasAttentionBackendImpl):
    """A layer's attention. Layers of encoders alone, which have no cache, stay with the engine's own kernel.

    The class above takes a soft cap, and its ``forward`` gives it to no kernel; only the name of a backend reaches the
    compiled function of a layer. So each cap has a backend of its own.
    """

    attention_backend = NAME

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `PallasAttentionBackendImpl`."""
        super().__init__(*args, **options)
        if self.logits_soft_cap:
            cap = float(self.logits_soft_cap)
            over, under = cap.as_integer_ratio()  # vLLM takes an identifier
            self.attention_backend = f"{NAME}_cap_{over}_{under}"
            register_attention_backend(
                self.attention_backend, attention=functools.partial(create, soft_cap=cap), vllm_backend=PATH
            )


class AttnopsBackend(PallasAttentionBackend):
    """What ``--attention-backend attnops`` names."""

    @staticmethod
    def get_name() -> str:
        return NAME.upper()

    @staticmethod
    def get_impl_cls() -> type[AttnopsBackendImpl]:
        return AttnopsBackendImpl
