"""Weights to and from a transformers model in PyTorch. Only these functions import torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_lm.checkpoint import config_of, mapping, param_of, refuse_wrapped
from attnops_lm.params import nested

if TYPE_CHECKING:
    from attnops_lm.model import Decoder


def to_torch(model: Decoder, loader: Any) -> Any:
    """A transformers model with the weights and the dtype of this one, on the CPU.

    Args:
        model: without LoRA or quantised layers.
        loader: a class such as ``transformers.AutoModelForCausalLM``.

    Raises:
        ModuleNotFoundError: torch or transformers is not installed.
        ValueError: the model has a layer with LoRA or a quantised one, which transformers' model can't have, or it has
            no head, which loader's model has.
    """
    import torch
    from transformers import AutoConfig

    refuse_wrapped(model)
    model.config.require_head()  # else save_pretrained, and transformers.AutoModel
    hf = config_of(model)
    if hasattr(model, "num_labels") and hf["pad_token_id"] is None:
        hf["pad_token_id"] = 0
    result = loader.from_config(AutoConfig.for_model(**hf))
    state = {}
    for weight in mapping(model):
        value = param_of(model, weight.path)[...]
        value = value.swapaxes(-1, -2) if weight.swapped else value
        host = np.ascontiguousarray(jax.device_get(value).astype(np.float32))  # torch reads no bfloat16 of NumPy
        state[weight.name] = torch.from_numpy(host)
    result = result.to(getattr(torch, model.embed[...].dtype.name))
    missing, unexpected = result.load_state_dict(state, strict=False)
    absent = [name for name in missing if not (name == "lm_head.weight" and model.config.tie_word_embeddings)]
    assert not absent, absent
    assert not unexpected, unexpected
    result.tie_weights()
    return result.eval()


def from_torch(model: Decoder, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a transformers model's ``state_dict()``, nested dicts for `merge_params_dict`.

    Args:
        model: gives config, dtype and names; its weights are not used, so that it may be from `lazy_init`.
        state_dict: tensors or arrays, by transformers' names. The head of a tied model is not read.

    Raises:
        ValueError: a weight is missing, or has another shape than the model's.
    """
    params = {}
    for weight in mapping(model):
        if weight.name not in state_dict:
            raise ValueError(f"the state dict has no {weight.name}, which {weight.path} is read from")
        tensor = state_dict[weight.name]
        value = np.asarray(tensor.detach().float().cpu().numpy() if hasattr(tensor, "detach") else tensor)
        value = value.swapaxes(-1, -2) if weight.swapped else value
        old = param_of(model, weight.path)
        if value.shape != tuple(old.shape):
            raise ValueError(f"{weight.name} has shape {tuple(value.shape)}, but {weight.path} has {tuple(old.shape)}")
        params[weight.path] = jnp.asarray(value, old.get_value().dtype)
    return nested(params)
