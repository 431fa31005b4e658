"""What the engine is refused when it starts."""

from __future__ import annotations

from typing import Any

from attnops import Reason
from attnops_caches.engines import refusal


def engine_reasons(config: Any) -> list[Reason]:
    """Why the backend can't serve an engine of this ``VllmConfig``.

    Ray and spawned processes are refused by tpu-inference itself, before any worker starts.
    """
    parallel, model, reasons = config.parallel_config, config.model_config, []
    if model is not None and model.use_mla:
        reasons.append(Reason("model", model.model, "has latent attention (MLA), for which the engine has no hook",
                              "leave --attention-backend out"))  # fmt: skip
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            reasons.append(Reason(name, size, "shards the context of each row, which is not served",
                                  f"give --{name.replace('_', '-')} 1"))  # fmt: skip
    if model is not None and (kind := _kind_of_model(config)) != "vllm":
        reasons.append(Reason("MODEL_IMPL_TYPE", kind, "the engine's models in JAX call its own kernel, whatever "
                              "--attention-backend names", "set MODEL_IMPL_TYPE=vllm"))  # fmt: skip
    if (transfer := config.kv_transfer_config) is not None:
        reasons.append(Reason("kv_transfer_config", transfer.kv_connector, "moves pages in the layout of the engine's "
                              "own kernel", "leave it out"))  # fmt: skip
    return reasons


def _kind_of_model(config: Any) -> str:
    """Whose models the engine runs: "vllm" for vLLM's in PyTorch, "flax_nnx" for those in JAX."""
    from tpu_inference.models.common.model_loader import resolve_model_impl_type

    return str(resolve_model_impl_type(config))


def check_engine() -> None:
    """Raise an `UnsupportedError` for what the current engine's configuration has; outside of an engine nothing."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and (reasons := engine_reasons(config)):
        raise refusal(*reasons)
