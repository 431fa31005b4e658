"""`attention_fn` for `flax.linen` and `flax.nnx`: their attention layers computed by attnops' operations.

::

    from flax import linen, nnx
    from attnops_adapters.flax import attention_fn

    linen.MultiHeadAttention(num_heads=8, attention_fn=attention_fn("flash"))
    nnx.MultiHeadAttention(8, 512, 512, attention_fn=attention_fn("flash"), decode=False, rngs=nnx.Rngs(0))

Differences from `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`:

| | Flax | here |
|---|---|---|
| a fully masked row | the mean of the values | 0, and sown weights of 0 |
| softmax of bfloat16 and float16 | linen: in that dtype, unless ``force_fp32_for_softmax`` | float32 |
| which weights dropout drops | `jax.random.bernoulli` | a hash of the key, `attnops.dropout` |
| ``dtype=float64``; a batch of size 0 | computed | refused |
| ``is_causal`` for one query of a cache (nnx) | it sees only key 0 | refused: the cache's mask is causal already |
| ``is_causal`` with a mask that does not broadcast to the scores (nnx) | an error | the mask broadcasts |
| einsums and dot_generals of the caller | used | refused |
| kv heads that divide the query's | nnx only | both |
| head dim of the values (nnx) | an error if it is not the key's | any |

Masks of Flax are arrays of T × S elements per row of the batch. ``attention_fn("flash", mask=Causal())`` gives a layer
a structured mask of O(T + S) memory, in addition to the call's.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import And, Causal, Dense, Full, Mask, Or
from attnops_adapters.arrays import boolean, flattened, flattened_scores, mapped_over_heads, promoted
from attnops_adapters.precision import precision_of

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

    from attnops import OperationOutput

__all__ = ["AttentionFn", "attention_fn"]


def attention_fn(operation: str = "auto", *, mask: Mask | None = None, **metadata: Any) -> AttentionFn:
    """A function for the argument ``attention_fn`` of layers of `flax.linen` and `flax.nnx`.

    Args:
        operation: the operation's name.
        mask: a mask for every call, in addition to the call's; without arrays, such as ``Causal()``.
        **metadata: fields of `attnops.OperationMetadata`. ``dropout_prob`` is the layer's ``dropout_rate``.

    Raises:
        ValueError: the operation is unknown, or a field of the metadata is outside its range, or the layer determines
            it.
    """
    for name in ("dropout_prob", "layout"):
        if name in metadata:
            raise ValueError(f"{name}={metadata[name]!r} must not be given: the layer determines it; leave it out")
    if mask is not None and jax.tree_util.tree_leaves(mask):
        raise ValueError(f"mask={mask!r} has arrays, but belongs to every call of a layer; give such masks to the call")
    meta = OperationMetadata(**metadata)
    OperationRegistry.create(operation, meta)
    return AttentionFn(operation, meta, mask)


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """An attention function, made by `attention_fn`. It is compared by its fields, so that layers don't compile twice.

    Attributes:
        operation: the operation's name.
        metadata: its metadata, except dropout and precision, which each call gives.
        mask: a mask for every call, in addition to the call's.
    """

    operation: str
    metadata: OperationMetadata
    mask: Mask | None = None

    # Linen passes only the parameters that are named here.
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Any] | None = None,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attention with the arguments of Flax's ``dot_product_attention``.

        Args:
            query: [batch..., T, H, D]; there may be no batch.
            key: [batch..., S, K, D]; K divides H.
            value: [batch..., S, K, Dv].
            bias: added to the scores; broadcasts to [batch..., H, T, S].
            mask: where it is not 0 a query may attend; broadcasts to [batch..., H, T, S].
            broadcast_dropout: whether all rows of the batch and all heads drop the same weights.
            dropout_rng: a PRNG key; needed to drop weights.
            dropout_rate: the probability in [0, 1) that a weight is dropped.
            deterministic: whether no weight is dropped.
            dtype: the dtype of the computation, float32, bfloat16 or float16; None for the arrays' promoted dtype.
            precision: the precision of matrix products; None for the metadata's, else JAX's default.
            module: the module that sows the attention weights, before dropout, as ``attention_weights``, in linen's
                collection "intermediates" or of nnx's type `Intermediate`; O(H · T · S) memory per row of the batch.
            force_fp32_for_softmax: no effect: the softmax is always float32.
            einsum_dot_general: only None.
            qk_attn_weights_einsum: only None.
            attn_weights_value_einsum: only None.
            promote_dtype: brings (query, key, value) to one dtype, given ``dtype``; None for JAX's promotion.
            is_causal: whether query i sees key j only where ``j <= i``, in addition to the mask.

        Returns:
            [batch..., T, H, Dv], in the dtype of the computation.

        Raises:
            ValueError: an argument is not supported, or shapes don't fit.
        """
        for name, given in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if given is not None:
                raise ValueError(f"{name}={given!r}: kernels compute matrix products themselves; it must be None")
        dropped = not deterministic and dropout_rate > 0
        if dropped and dropout_rng is None:
            raise ValueError(f"{dropout_rate=} with deterministic=False needs dropout_rng, but it is None")
        query, key, value = (promote_dtype or promoted)((query, key, value), dtype=dtype)
        _check(query, key, value)
        structured = [] if self.mask is None else [self.mask]
        if self.mask is not None:
            _check_mask(self.mask, query.shape[-3], key.shape[-3], dropped and broadcast_dropout)
        if is_causal:
            structured.append(_causal(query.shape[-3], key.shape[-3]))
        batch, shape = query.shape[:-3], (*query.shape[:-1], value.shape[-1])
        scores = {}
        if mask is not None:
            scores["mask"] = flattened_scores("mask", boolean(mask), batch)
        if bias is not None:
            scores["bias"] = flattened_scores("bias", promoted((bias,), None)[0], batch)
        arrays = [flattened(x, 3) for x in (query, key, value)]
        metadata = self.metadata.replace(precision=precision_of(precision, self.metadata.precision))
        attend = functools.partial(_attend, self.operation, metadata, structured)
        if module is not None:
            output = attend(*arrays, **scores, return_weights=True)
            weights: Any = output.attention_weights
            _sow(module, weights.reshape(*batch, *weights.shape[1:]))
            if not dropped:
                return output.attention_outputs.reshape(shape)
        if dropped:
            dropping = metadata.replace(dropout_prob=dropout_rate)
            attend = functools.partial(_attend, self.operation, dropping, structured, dropout_key=dropout_rng)
        if dropped and broadcast_dropout:
            # Dropout hashes indices within a slice of `jax.vmap`, where each row and head has index 0.
            q, k, v = arrays
            out = mapped_over_heads(lambda *a, **given: attend(*a, **given).attention_outputs, q, k, v, scores)
            return out.reshape(shape)
        return attend(*arrays, **scores).attention_outputs.reshape(shape)


def _attend(
    operation: str,
    metadata: OperationMetadata,
    structured: list[Mask],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    **options: Any,
) -> OperationOutput:
    masks = [*structured, *([] if mask is None else [Dense(mask)])]
    combined = functools.reduce(operator.and_, masks) if masks else None
    return OperationRegistry.create(operation, metadata)(query, key, value, mask=combined, **options)


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = [x.shape for x in (query, key, value)]
    if any(len(shape) < 3 for shape in shapes) or len({shape[:-3] for shape in shapes}) != 1:
        raise ValueError(
            f"query, key and value have shapes {', '.join(map(str, shapes))}, but must be [batch..., length, heads,"
            " head_dim] with the same batch"
        )


def _check_mask(mask: Mask, T: int, S: int, is_mapped: bool) -> None:
    """Raise a `ValueError` if a layer's mask would have another meaning in this call than in others."""
    if T == 1 < S and not _holds_at_any_index(mask):
        raise ValueError(
            f"mask={mask!r} of a layer, with T=1 query and S={S} keys: in Flax's cache the query is not the last key,"
            " and its position is not known here; give the call an array mask, or decode over attnops_caches"
        )
    if is_mapped and "MaskFn" in mask.kinds():
        raise ValueError(
            f"mask={mask!r} of a layer with broadcast_dropout=True, which computes each head separately, so that the"
            " function would see only head 0 and row 0; set broadcast_dropout=False, or give the call an array mask"
        )


def _holds_at_any_index(mask: Mask) -> bool:
    """Whether the last query of a sequence sees the same keys at any index of a cache: all keys before it."""
    if isinstance(mask, And | Or):
        return _holds_at_any_index(mask.left) and _holds_at_any_index(mask.right)
    return isinstance(mask, Full) or (isinstance(mask, Causal) and mask.offset is None)


def _causal(T: int, S: int) -> Mask:
    if T == 1 < S:
        raise ValueError(
            f"is_causal=True with T=1 query and S={S} keys would see only key 0, since Flax aligns causal masks at the"
            " start; leave it out: the mask of a cache is causal already"
        )
    return Causal(offset=0)


def _sow(module: Any, weights: jax.Array) -> None:
    from flax import nnx

    collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(collection, "attention_weights", weights)
