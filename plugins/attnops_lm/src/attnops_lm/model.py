"""The models: a decoder with a head over the vocabulary, and one with a head over classes.

Dimensions: `B` rows, `T` tokens, `V` vocabulary, `M` width, `L` layers, `C` classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import KeyPadding, Mask, Segments
from attnops_caches import Rows
from attnops_lm.caching import Caching, LayerCache, counted, with_one_length, without_shared_arrays
from attnops_lm.config import Config
from attnops_lm.decoder_layer import DecoderLayer
from attnops_lm.dtypes import floating
from attnops_lm.generation import Generation
from attnops_lm.layers import Linear, Norm, precision
from attnops_lm.origin import Origin
from attnops_lm.pretrained import Pretrained
from attnops_lm.protocol import CausalLMProtocol, ClassifierProtocol
from attnops_lm.rotary import rotary_tables

Caches = tuple[LayerCache, ...]


class CausalLMOutput(NamedTuple):
    """The output of a `CausalLM`."""

    logits: jax.Array  # float32 [B, T, V], or [B, n, V] with logits_at
    past_key_values: Caches | None  # with the tokens appended, one per layer
    last_hidden_state: jax.Array  # [B, T, M], normalised


class SequenceClassifierOutput(NamedTuple):
    """The output of a `SequenceClassifier`."""

    logits: jax.Array  # float32 [B, C]
    last_hidden_state: jax.Array  # [B, T, M], normalised


class Decoder(nnx.Module):
    """Tokens to hidden states: the embedding, the layers, and the last norm."""

    def __init__(
        self,
        config: Config,
        operation: str = "flash",
        metadata: OperationMetadata | None = None,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.runtime_dtype = floating("dtype", dtype)
        self.operation_name = operation
        self.origin = Origin()
        self.metadata = OperationMetadata(on_unsupported="error") if metadata is None else metadata
        op: Any = OperationRegistry.create(operation, self.metadata)
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32)
        self.embed = nnx.Param((table * config.hidden_size**-0.5).astype(dtype))
        self.layers = nnx.List([DecoderLayer(config, i, op, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = Norm(config.hidden_size, config, dtype=dtype)

    @property
    def dtype(self) -> jnp.dtype[Any]:
        """The dtype of caches and of the computation, except norms, softmax and logits."""
        return self.runtime_dtype

    def hidden(
        self,
        input_ids: jax.Array | None,
        *,
        inputs_embeds: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        past_key_values: Caches | None = None,
        query_lengths: jax.Array | None = None,
        rows: Rows | None = None,
        mask: Mask | None = None,
    ) -> tuple[jax.Array, Caches | None]:
        """Hidden states [B, T, M] and the caches, for the arguments of `CausalLM.__call__`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds, not both or neither")
        if past_key_values is not None and (attention_mask is not None or segment_ids is not None):
            raise ValueError(
                "attention_mask and segment_ids are for calls without past_key_values; with caches give query_lengths, "
                "and left padding as starts to init_cache"
            )
        if past_key_values is None and (query_lengths is not None or rows is not None):
            raise ValueError("query_lengths and rows are for calls with past_key_values; without, give attention_mask")
        if past_key_values is not None and len(past_key_values) != self.config.num_layers:
            raise ValueError(f"{len(past_key_values)} caches given, but the model has {self.config.num_layers} layers")
        given = (input_ids, inputs_embeds, attention_mask, segment_ids)
        input_ids, inputs_embeds, attention_mask, segment_ids = _checked(*given)
        if input_ids is not None:
            x = self.embed[...][input_ids].astype(self.dtype)
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        else:
            assert inputs_embeds is not None
            x = inputs_embeds.astype(self.dtype)
        if segment_ids is not None:
            mask = Segments(segment_ids) if mask is None else Segments(segment_ids) & mask
        if attention_mask is not None:
            padding = KeyPadding(attention_mask.astype(bool))
            mask = padding if mask is None else padding & mask
        positions = position_ids
        if positions is None:
            shape = x.shape[:2]
            positions = _positions(shape, attention_mask, segment_ids, past_key_values, query_lengths, rows)
        tables = {kind: rotary_tables(rotary, positions) for kind, rotary in self.config.rotary}
        caches: list[LayerCache] = []
        shared = None if past_key_values is None else with_one_length(past_key_values)
        masks = {"linear_attention": mask}
        if past_key_values is not None and self.config.has_linear_layers and rows is None:
            first, place = counted(past_key_values), jnp.arange(x.shape[1])
            real = KeyPadding(first.lengths[:, None] + place >= first.starts[:, None])  # left padding changes no state
            masks["linear_attention"] = real if mask is None else mask & real
        for i, layer in enumerate(self.layers):
            cache = None if shared is None else shared[i]
            kind = self.config.layer_types[i]
            x, cache = layer(x, tables.get(kind), masks.get(kind, mask), cache, query_lengths, rows)
            if cache is not None and past_key_values is not None:
                caches.append(without_shared_arrays(cache, past_key_values[i]))
        return self.norm(x), tuple(caches) if past_key_values is not None else None


def _checked(*given: Any) -> tuple[jax.Array | None, ...]:
    """Tokens or their embeddings, their mask and their documents, as arrays whose shapes fit."""
    ids, embeds, mask, segments = arrays = tuple(None if x is None else jnp.asarray(x) for x in given)
    if ids is not None and (ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer)):
        raise ValueError(f"input_ids are {ids.dtype} {ids.shape}, but must be integers [B, T]")
    if embeds is not None and embeds.ndim != 3:
        raise ValueError(f"inputs_embeds have shape {embeds.shape}, but must be [B, T, M]")
    given_tokens = embeds if ids is None else ids
    assert given_tokens is not None
    tokens = given_tokens.shape[:2]
    for name, x in (("attention_mask", mask), ("segment_ids", segments)):
        if x is not None and x.shape != tokens:
            raise ValueError(f"{name} has shape {x.shape}, but must have the shape of the tokens, {tokens}")
    return arrays


def _positions(
    shape: tuple[int, ...],
    attention_mask: jax.Array | None,
    segment_ids: jax.Array | None,
    caches: Caches | None,
    query_lengths: jax.Array | None,
    rows: Rows | None,
) -> jax.Array:
    """The position of each token in its sequence, int32 [B, T]; padding has any non-negative value."""
    B, T = shape
    place = jnp.arange(T, dtype=jnp.int32)
    if caches is not None and rows is not None:
        first = counted(caches)
        lengths = first.lengths.at[rows.slots].add(rows.counts(T, first.batch), mode="drop")
        row, index = rows.of_queries(T, lengths)
        return jnp.maximum(index - first.starts[row], 0)[None]
    if caches is not None:
        first = counted(caches)
        return jnp.maximum((first.lengths - first.starts)[:, None] + place, 0)
    if segment_ids is not None:
        is_first = jnp.concatenate([jnp.ones((B, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
        return place - jax.lax.cummax(jnp.where(is_first, place, 0), axis=1)
    if attention_mask is not None:
        return jnp.maximum(jnp.cumsum(attention_mask.astype(jnp.int32), axis=1) - 1, 0)
    return jnp.broadcast_to(place, (B, T))


class CausalLM(Decoder, Caching, Pretrained, Generation, CausalLMProtocol):
    """A decoder-only language model.

    Args:
        config: sizes and choices; `Config.family` says how checkpoints name them.
        operation: the name of the attention operation, any that `OperationRegistry` knows.
        metadata: the metadata of the operation; None: calls that it does not support raise.
        dtype: the dtype of the weights and of the computation; `to_dtype` changes it.
        rngs: the random numbers of the initial weights; None: seed 0.
    """

    def __init__(
        self,
        config: Config,
        operation: str = "flash",
        metadata: OperationMetadata | None = None,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        super().__init__(config, operation, metadata, dtype=dtype, rngs=rngs)
        has_none = config.tie_word_embeddings or not config.has_head
        self.head = None if has_none else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, input_ids: jax.Array | None = None, *, logits_at: jax.Array | None = None, **options: Any
    ) -> CausalLMOutput:
        """The logits of the token that follows each token.

        Args:
            input_ids: integers [B, T]; [1, N] with ``rows``.
            logits_at: integers [B, n], [1, n] with ``rows``: the tokens whose logits are computed; None: all.
            **options: inputs_embeds: [B, T, M], in place of input_ids; already scaled, if the family scales embeddings.
                attention_mask: [B, T], 0 for padding, left or right; only without caches.
                position_ids: integers [B, T]; None: counted from each sequence's first token.
                segment_ids: integers [B, T], documents that are packed into a row; only without caches.
                past_key_values: one cache per layer; the T tokens are appended, and attend to all tokens that it holds.
                query_lengths: integers [B]: the first ``query_lengths[b]`` tokens of row b are real; only with caches.
                rows: an `attnops_caches.Rows`, if tokens of several rows of the caches are packed in one row;
                    with linear layers, rows without left padding.
                mask: a mask that hides more keys, such as `attnops.masks.Ancestors` for drafted trees.

        Memory: logits are float32, B · T · V · 4 bytes without ``logits_at``.

        Raises:
            ValueError: options exclude each other or do not fit the tokens, or there is not one cache per layer.
        """
        hidden, caches = self.hidden(input_ids, **options)
        x = hidden if logits_at is None else jnp.take_along_axis(hidden, jnp.asarray(logits_at)[..., None], axis=1)
        return CausalLMOutput(self.logits(x), caches, hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B, T, M] to float32 [B, T, V]; NaN if `Config.has_head` is False."""
        if not self.config.has_head:
            return jnp.full((*hidden.shape[:-1], self.config.vocab_size), jnp.nan, jnp.float32)
        if self.head is not None:
            scores = self.head(hidden)
        else:
            # The table is the left operand: for few tokens XLA's product is then bound by reading it once.
            flat = hidden.reshape(-1, hidden.shape[-1])
            table = self.embed[...].astype(hidden.dtype)
            scores = jnp.einsum("vm,nm->vn", table, flat, precision=precision(hidden)).T
            scores = scores.reshape(*hidden.shape[:-1], table.shape[0])
        scores = scores.astype(jnp.float32)
        cap = self.config.final_soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


class SequenceClassifier(Decoder, Pretrained, ClassifierProtocol):
    """A decoder with a head over classes, read at each row's last token that is not padding."""

    @classmethod
    def head_options(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """``num_labels``: as many as the config names, two if it names none, as in transformers."""
        return {"num_labels": len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)}

    def __init__(self, config: Config, num_labels: int, operation: str = "flash", **options: Any) -> None:
        rngs = options.pop("rngs", None) or nnx.Rngs(0)
        dtype = options.get("dtype", jnp.float32)
        super().__init__(config, operation, rngs=rngs, **options)
        self.num_labels = num_labels
        self.score = Linear(config.hidden_size, num_labels, dtype=dtype, rngs=rngs)

    def __call__(
        self, input_ids: jax.Array | None = None, *, attention_mask: jax.Array | None = None, **options: Any
    ) -> SequenceClassifierOutput:
        """The logits of the classes, float32 [B, C], for the arguments of `CausalLM.__call__` without caches.

        Raises:
            ValueError: past_key_values are given.
        """
        if options.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values are given, but a classifier reads a whole sequence in one call: leave them out"
            )
        hidden, _ = self.hidden(input_ids, attention_mask=attention_mask, **options)
        B, T, _ = hidden.shape
        last = jnp.full((B,), T - 1)
        if attention_mask is not None:
            last = (T - 1) - jnp.argmax(jnp.asarray(attention_mask)[:, ::-1].astype(bool), axis=1)
        pooled = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        return SequenceClassifierOutput(self.score(pooled).astype(jnp.float32), hidden)
