"""Attention of transformers' models by attnops: `AttentionInterface`, `AttentionMaskInterface` and autograd.

A model creates its mask once and gives it to all its attention layers. It describes the mask as a function of indices,
put together from a few known ones; `structured` makes the same expression of attnops' masks, so that no T × S array
arises. PyTorch differentiates the model, and `jax.vjp` each attention of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Chunked, Dense, Full, KeyPadding, Mask, PrefixLM, Segments, SlidingWindow

# Of query, key, value, and the keywords mask, bias, softmax_scale, logits_soft_cap and sinks: [B, H, T, Dv].
Attend = Callable[..., jax.Array]


def operation(name: str = "flash") -> Attend:
    """The operation of that name as a function of arrays [B, H, T, D]; it raises where it can't serve a call."""
    op = OperationRegistry.create(name, OperationMetadata(layout="BHTD", on_unsupported="error"))
    return lambda *arrays, **options: op(*arrays, **options).attention_outputs


def register(name: str, attend: Attend) -> None:
    """Make ``attend`` the attention of models with ``attn_implementation=name``."""
    AttentionInterface.register(name, functools.partial(attention, attend))
    AttentionMaskInterface.register(name, create_mask)


# Attention


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    cache: Any = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer.

    What is ignored does not change the result: positions, and the window, which is a part of the mask.

    Args:
        attend: see `operation`.
        module: the layer; says whether it is causal if nothing else does.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, Dv].
        attention_mask: an `ExpressionTensor`, another boolean tensor [B, 1 or H, T, S], or None.
        dropout: probability; only 0.
        scaling: the scale of the scores; None for ``D ** -0.5``.
        softcap: the soft cap of the scores.
        s_aux: [H], the sinks.
        position_bias: broadcasts to [B, H, T, S].
        is_causal: what holds without a mask; None for what the layer says.
        output_attentions: whether weights are asked for; only False.
        cache: the pages of continuous batching; only None.
        ignored: more about the call.

    Returns:
        [B, T, H, Dv], and None for the weights.

    Raises:
        ValueError: one of the above has a value that is not served.
    """
    if dropout or output_attentions or cache is not None:
        raise ValueError(f"{dropout=}, {output_attentions=} and {cache=} must be 0, False and None")
    lengths = query.shape[2], key.shape[2]
    if attention_mask is not None and tuple(attention_mask.shape[-2:]) != lengths:
        raise ValueError(f"a mask of shape {tuple(attention_mask.shape)} must end with T and S={lengths}")
    if isinstance(attention_mask, ExpressionTensor):
        mask = attention_mask.mask
    elif attention_mask is not None:
        if attention_mask.dtype != torch.bool:
            raise ValueError(f"a mask of dtype {attention_mask.dtype} must be boolean: an additive one is a bias")
        mask = Dense(to_jax(attention_mask))
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Causal() if causal and query.shape[2] > 1 else Full()
    options = {"mask": mask, "softmax_scale": scaling, "logits_soft_cap": softcap}
    call = functools.partial(attend, **{name: value for name, value in options.items() if value is not None})
    return Attention.apply(call, query, key, value, position_bias, s_aux).transpose(1, 2), None


class Attention(torch.autograd.Function):
    """Attention whose derivative is `jax.vjp`'s."""

    @staticmethod
    def forward(ctx: Any, call: Attend, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Of query, key, value, bias and sinks."""

        def run(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> jax.Array:
            given = {name: x for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
            return call(query, key, value, **given)

        out, ctx.vjp = jax.vjp(run, *(None if x is None else to_jax(x) for x in tensors))
        return to_torch(out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(None if x is None else to_torch(x) for x in ctx.vjp(to_jax(d_out)))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy: PyTorch may write to its own in place, and JAX keeps this one for the backward pass."""
    return jnp.array(tensor.detach().contiguous(), copy=True)


def to_torch(array: jax.Array) -> torch.Tensor:
    """A copy, see `to_jax`."""
    return torch.from_dlpack(array).clone()


# Masks


class ExpressionTensor(torch.Tensor):
    """A mask as a tensor [B, 1, T, S] of one element of memory: models pass those on, but no other objects.

    Its values mean nothing, and what would read them raises a `TypeError`.
    """

    mask: Mask

    @classmethod
    def of(cls, mask: Mask, shape: tuple[int, int, int]) -> ExpressionTensor:
        B, T, S = shape
        self = torch.zeros((), dtype=torch.bool).expand(B, 1, T, S).as_subclass(cls)
        self.mask = mask
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and not hasattr(result, "mask"):
            raise TypeError(f"{func.__name__} of a mask that is an expression; the model must pass it on as it is")
        return result


@dataclasses.dataclass(frozen=True)
class Indices:
    """The indices at which a model's mask function is asked: those of queries and of keys among all tokens."""

    batch: int
    queries: range
    keys: range
    offset: int | None  # of the first query from the first key; None where positions are given

    def of_queries(self, tokens: torch.Tensor) -> np.ndarray:
        """``tokens[:, index]`` of the queries, [B, T]."""
        return tokens.numpy()[:, self.queries.start : self.queries.stop]

    def of_keys(self, tokens: torch.Tensor) -> np.ndarray:
        """``tokens[:, index]`` of the keys, [B, S]."""
        return tokens.numpy()[:, self.keys.start : self.keys.stop]

    def dense(self, function: Callable[..., torch.Tensor]) -> Mask:
        """A function's values, where its structure is not known."""
        lengths = (self.batch, len(self.queries), len(self.keys), self.queries.start, self.keys.start)
        values = masking_utils.sdpa_mask(*lengths, function, allow_is_causal_skip=False, use_vmap=True)
        return Dense(to_jax(values))


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> ExpressionTensor:
    """The mask of a model's layers, which they give to `attention`. Never None, which would leave it to each layer.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: S.
        q_offset: the index of the first query.
        kv_offset: the index of the first key.
        mask_function: of indices (b, h, q, kv), see `structured`.
        attention_mask: [B, tokens so far], False for padding.
        ignored: what other implementations need.
    """
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    queries, keys = range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length)
    indices = Indices(batch_size, queries, keys, q_offset - kv_offset)
    mask = structured(mask_function, indices)
    if attention_mask is not None:
        tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask = mask & KeyPadding(indices.of_keys(tokens))
    return ExpressionTensor.of(mask, (batch_size, q_length, kv_length))


def structured(function: Callable[..., torch.Tensor], indices: Indices) -> Mask:
    """The mask that a function of transformers' `masking_utils` describes, by its name and what it closes over."""
    known = getattr(function, "__module__", None) == masking_utils.__name__
    translate = STRUCTURES.get(function.__qualname__.partition(".")[0]) if known else None
    result = translate(indices, **inspect.getclosurevars(function).nonlocals) if translate else None
    return indices.dense(function) if result is None else result


def _union(indices: Indices, mask_functions: tuple[Callable[..., torch.Tensor], ...]) -> Mask:
    masks = [structured(function, indices) for function in mask_functions]
    match masks:
        case [Causal(offset=0), Segments(q_ids=ids)] if (lengths := _prefix_lengths(ids)) is not None:
            return PrefixLM(lengths, 0)
    return functools.reduce(operator.or_, masks)


def _prefix_lengths(ids: np.ndarray) -> np.ndarray | None:
    """The length of each row's only block, [B, 1]; None unless all rows have one at most, at the start."""
    lengths = (ids >= 0).sum(1, keepdims=True)
    inside = np.arange(ids.shape[1]) < lengths
    return lengths if np.array_equal(np.where(inside, ids[:, :1], -1), ids) else None


def _intersection(indices: Indices, mask_functions: tuple[Callable[..., torch.Tensor], ...]) -> Mask:
    return functools.reduce(operator.and_, [structured(function, indices) for function in mask_functions])


def _chunks(indices: Indices, chunk_size: int, left_padding: torch.Tensor) -> Mask:
    """Chunks counted from the first token of each row."""
    start = left_padding.numpy()[:, None]
    return Chunked(chunk_size).at(np.array(indices.queries) - start, np.array(indices.keys) - start)


def _blocks(indices: Indices, block_sequence_ids: torch.Tensor) -> Mask:
    """Tokens see those of their own block; one with a negative id sees none."""
    q_ids, kv_ids = indices.of_queries(block_sequence_ids), indices.of_keys(block_sequence_ids)
    return Segments(np.where(q_ids < 0, -1, q_ids), np.where(kv_ids < 0, -2, kv_ids))


def _packed(indices: Indices, packed_sequence_mask: torch.Tensor) -> Mask:
    return Segments(indices.of_queries(packed_sequence_mask), indices.of_keys(packed_sequence_mask))


def _remapped(indices: Indices, mask_function: Callable[..., torch.Tensor], position_ids: torch.Tensor) -> Mask | None:
    """A mask of positions in the tokens' own sequences."""
    inner = structured(mask_function, dataclasses.replace(indices, offset=None))
    if not inner.kinds() <= {"Causal", "SlidingWindow", "Chunked", "at", "&", "|"}:
        return None  # a mask of tokens, at positions for indices
    return inner.at(indices.of_queries(position_ids), indices.of_keys(position_ids))


def _padding(indices: Indices, padding_mask: torch.Tensor) -> Mask:
    return KeyPadding(indices.of_keys(padding_mask))


def _causal(indices: Indices) -> Mask:
    return Causal(indices.offset)


def _all(indices: Indices) -> Mask:
    return Full()


def _window(indices: Indices, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window - 1, None, indices.offset)


def _window_both_ways(indices: Indices, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window, sliding_window, indices.offset)


STRUCTURES: dict[str, Callable[..., Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _all,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
    "padding_mask_function": _padding,
    "and_masks": _intersection,
    "or_masks": _union,
}
