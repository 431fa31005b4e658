"""Attention of Hugging Face transformers' models, in PyTorch, by attnops' operations.

::

    from attnops_adapters import transformers as attnops_transformers

    attnops_transformers.register()  # flash, by the name "attnops"
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnops")

A model's mask becomes an expression such as ``Causal() & SlidingWindow(4095, 0) & KeyPadding(...)``, without a T × S
array, if it is one of transformers' mask functions or is composed of them; any other function becomes an array.
PyTorch differentiates the model, and JAX each attention layer. Tensors are copied to JAX and back.

A program is compiled for each kind of layer and bucket of lengths, and one more for its derivative: queries and keys
are padded to a power of 2 up to 64, to multiples of 64 up to 512, then by at most an eighth, and no query sees the
padding. ``generate`` with its growing cache compiles 3 programs for 64 tokens.

Differences from ``attn_implementation="eager"``:

| | eager | here |
|---|---|---|
| a fully masked row (padding on the left) | the mean of the values | 0 |
| softmax of bfloat16 and float16 | as the model says | float32 |
| ``output_attentions=True`` | the weights | refused |
| an additive mask of floating-point numbers | added | refused: give a boolean one |
| which weights dropout drops | PyTorch's generator decides | a hash of a key that `torch.manual_seed` determines |
| pages of continuous batching | served | refused |
| keywords of a model's layers that are not known here, such as ``indices`` | used | refused |
| an additive mask of integers or booleans that a caller makes | added to the scores | True may be seen |
| float64; second derivatives; a learned ``scaling`` | computed | refused |
| models that call no attention interface, such as MPT and BLOOM | | not changed, without a message; `uses` tells |
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

import jax
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import TransformersKwargs

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Dense, Full, Mask, SlidingWindow
from attnops_adapters.buckets import pad_mask
from attnops_adapters.torch_arrays import to_jax
from attnops_adapters.torch_call import Attend, Call, run
from attnops_adapters.transformers_masks import ExpressionTensor, create_mask

__all__ = ["Attend", "attend_with", "attention", "register", "uses"]

# Keywords that models pass on, and that do not change what a layer computes, given its mask.
_HARMLESS: Final = frozenset(TransformersKwargs.__annotations__) | {
    "cache_position", "deterministic", "layer_idx", "logits_to_keep", "return_dict", "use_cache",
}  # fmt: skip


def register(name: str = "attnops", operation: str | Attend = "flash", **metadata: Any) -> None:
    """Make an operation the attention of models with ``attn_implementation=name``, with masks as expressions.

    Args:
        name: the name of the implementation; it replaces one that is registered.
        operation: the operation's name; or a function of arrays [B, H, T, D], an `Attend`.
        **metadata: fields of `attnops.OperationMetadata`. By default a call that the operation can't serve raises
            (``on_unsupported="error"``).

    Raises:
        ValueError: the operation is unknown, or a field of the metadata is outside its range.
    """
    if not isinstance(operation, str) and metadata:
        raise ValueError(f"metadata {sorted(metadata)} must not be given with a function; give an operation's name")
    attend = attend_with(operation, **metadata) if isinstance(operation, str) else operation
    AttentionInterface.register(name, functools.partial(attention, attend))
    AttentionMaskInterface.register(name, create_mask)


def uses(model: torch.nn.Module) -> bool:
    """Whether some layer of a model looks up its attention where `register` puts it, as most models of transformers do.

    MPT, BLOOM and DeBERTa-v2 ignore ``attn_implementation="attnops"``; transformers gives at most a warning. Falcon
    raises a `KeyError`.
    """
    forwards = (inspect.unwrap(type(module).forward) for module in model.modules())
    return any("ALL_ATTENTION_FUNCTIONS" in getattr(getattr(f, "__code__", None), "co_names", ()) for f in forwards)


def attend_with(operation: str = "flash", **metadata: Any) -> Attend:
    """The operation of this name as a function of arrays [B, H, T, D]."""
    meta = OperationMetadata(**{"on_unsupported": "error"} | metadata | {"layout": "BHTD"})
    OperationRegistry.create(operation, meta)

    def attend(*arrays: jax.Array, dropout_prob: float = 0.0, **options: Any) -> jax.Array:
        op = OperationRegistry.create(operation, meta.replace(dropout_prob=dropout_prob))
        return op(*arrays, **options).attention_outputs

    return attend


def attention(
    attend: Attend,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        attend: the operation on arrays [B, H, T, D], from `attend_with`.
        module: the layer; says whether it is causal if nothing else does.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, Dv].
        attention_mask: a mask from `create_mask`, another boolean tensor [B, 1 or H, T, S], or None.
        dropout: the probability that a weight is dropped.
        scaling: the scale of the scores, a number; None for ``D ** -0.5``.
        sliding_window: how many of the last tokens a causal layer sees; ignored with a mask, which has it already.
        softcap: the soft cap of the scores.
        s_aux: [H], the sinks.
        position_bias: broadcasts to [B, H, T, S].
        is_causal: whether the layer is causal, if there is no mask; None: the layer's attribute says.
        output_attentions: whether weights are asked for; only False.
        cache: the pages of continuous batching; only None.
        others: keywords of `_HARMLESS`, such as positions, do not change the result; others must be None.

    Returns:
        [B, T, H, Dv], and None for the weights.

    Raises:
        ValueError: an argument has a value that is not supported.
    """
    if output_attentions or cache is not None:
        raise ValueError(f"{output_attentions=} and {cache=} must be False and None; use attn_implementation='eager'")
    for name, given in others.items():
        if name not in _HARMLESS and given is not None:
            raise ValueError(
                f"{type(module).__name__} gives its attention {name}=<{type(given).__name__}>, which attnops does not"
                " know, and which must be None; use attn_implementation='eager'"
            )
    if isinstance(scaling, torch.Tensor):
        if scaling.requires_grad:
            raise ValueError("a learned scaling must be a number; multiply the query by it, and give scaling=1.0")
        scaling = float(scaling)
    if query.dtype == torch.float64:
        raise ValueError("query of dtype float64 must be float32, bfloat16 or float16; convert the model")
    B, H, T, S = (int(n) for n in (*query.shape[:3], key.shape[2]))
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _without_a_mask(bool(causal), T, S, sliding_window)
        mask = pad_mask(mask, B, H, T, S)
    else:
        mask = _mask(attention_mask, B, H, T, S)
    numbers = {"softmax_scale": scaling, "logits_soft_cap": softcap, "dropout_prob": dropout or None}
    call = Call(attend, tuple((name, float(x)) for name, x in numbers.items() if x is not None))
    seed = int(torch.randint(2**31 - 1, ())) if dropout else None
    out = run(call, (query, key, value, position_bias, s_aux), mask, seed)
    return out.transpose(1, 2), None


def _mask(mask: torch.Tensor, B: int, H: int, T: int, S: int) -> Mask:
    if tuple(mask.shape[-2:]) != (T, S):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} must end with T and S={(T, S)}")
    if isinstance(mask, ExpressionTensor):
        return mask.padded(B, H)
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask of dtype {mask.dtype} must be boolean: an additive one is a bias")
    return pad_mask(Dense(to_jax(mask)), B, H, T, S)


def _without_a_mask(causal: bool, T: int, S: int, window: int | None) -> Mask:
    if window is not None and window < S:
        if not causal:
            raise ValueError(f"sliding_window={window} without a mask needs a causal layer; give attention_mask")
        return Causal() & SlidingWindow(window - 1, None)
    return Causal() if causal and T > 1 else Full()
