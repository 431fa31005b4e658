"""`jax.nn.dot_product_attention` computed by attnops' operations: the same signature and the same conventions.

::

    from attnops_adapters.jax_nn import dot_product_attention, use

    out = dot_product_attention(query, key, value, is_causal=True)
    with use("flash"):  # jax.nn.dot_product_attention itself, for Flax NNX and your own code
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True)

Differences:

| | `jax.nn` | here |
|---|---|---|
| a fully masked row | the mean of the values; residual about −2e38 | 0; residual −inf |
| head dim of ``value`` | the key's | any |
| ``query_seq_lengths``, ``key_value_seq_lengths`` | int32 | any integers |
| ``implementation`` | "xla", "cudnn" | also the name of an operation; None: the operation of `use`, else ``"auto"`` |
| ``local_window_size`` with a negative number, as (-1, 2) | a band off the diagonal | refused |
| a bias of +inf or NaN | NaN in all rows that share its softmax | NaN only in its row |
| float64, complex numbers, integers; a batch or length of 0; a traced ``scale`` | computed | refused |

Causal masks and windows are aligned at the start, as in `jax.nn`: query i is at position i for any number of keys.
`attnops.masks.Causal()` is aligned at the end.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Dense, Lengths, Mask, SlidingWindow
from attnops_adapters.precision import precision_of
from attnops_adapters.used import Stack, checked_metadata

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = ["dot_product_attention", "use"]

_JAX_ATTENTION: Final[Any] = jax.nn.dot_product_attention

# The operation and the metadata of calls that name no operation: the last ones that `use` pushed.
_USED: Final = Stack(("auto", OperationMetadata()))


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention with the arguments and conventions of `jax.nn.dot_product_attention`.

    Args:
        query: [B, T, N, H] or [T, N, H], float32, bfloat16 or float16; N query heads of head dim H.
        key: [B, S, K, H] or [S, K, H]; K divides N.
        value: [B, S, K, Hv] or [S, K, Hv].
        bias: added to the scores; broadcasts to [B, N, T, S].
        mask: boolean, True where a query may attend; broadcasts to [B, N, T, S].
        scale: the scale of the scores; None for ``H ** -0.5``.
        is_causal: whether query i sees key j only where ``j <= i``, also for T ≠ S.
        query_seq_lengths: integers [B]; later queries give 0.
        key_value_seq_lengths: integers [B]; later keys are seen by no query.
        local_window_size: (left, right), or one number for both: query i sees key j where
            ``i - left <= j <= i + right``.
        implementation: the name of an operation of attnops; None: the operation of `use`, else ``"auto"``. "xla" and
            "cudnn" call `jax.nn`.
        return_residual: whether to return also the logsumexp.

    Returns:
        The output, [B, T, N, Hv] or [T, N, Hv]; with ``return_residual`` also the logsumexp, [B, T, N] or [T, N], in
        the key's dtype, which has no gradient.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value.
    """
    if implementation in ("xla", "cudnn"):
        options = {
            "scale": scale,
            "is_causal": is_causal,
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
            "local_window_size": local_window_size,
            "return_residual": return_residual,
        }
        return _JAX_ATTENTION(query, key, value, bias, mask, implementation=implementation, **options)
    shape, key_shape = jnp.shape(query), jnp.shape(key)
    query, key, value = (_with_batch(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key have shapes {shape} and {key_shape}, but must have the same batch")
    operation, metadata = _USED.last if implementation is None else (implementation, OperationMetadata())
    masks = [
        *([Causal(offset=0)] if is_causal else []),
        *([] if local_window_size is None else [_window(local_window_size)]),
        *_lengths(key.shape[:2], query_seq_lengths, key_value_seq_lengths),
        *([] if mask is None else [_dense(mask)]),
    ]
    op = OperationRegistry.create(operation, metadata.replace(precision=precision_of(None, metadata.precision)))
    out = op(
        query,
        key,
        value,
        mask=functools.reduce(operator.and_, masks) if masks else None,
        bias=None if bias is None else _bias(bias),
        softmax_scale=scale,
        return_lse=return_residual,
    )
    outputs = out.attention_outputs.reshape(*shape[:-1], value.shape[-1])
    if not return_residual:
        return outputs
    residual = jax.lax.stop_gradient(out.logsumexp).swapaxes(1, 2).astype(key.dtype)
    return outputs, residual.reshape(shape[:-1])


@contextlib.contextmanager
def use(operation: str = "auto", **metadata: Any) -> Iterator[None]:
    """A context in which an operation of attnops computes `jax.nn.dot_product_attention`, in all threads.

    Programs that `jax.jit` traced before do not change. An explicit ``implementation`` of a call is honoured.

    Args:
        operation: the operation's name.
        **metadata: fields of `attnops.OperationMetadata`.

    Raises:
        ValueError: the operation is unknown, or a field of the metadata is outside its range.
    """
    meta = checked_metadata(metadata)
    OperationRegistry.create(operation, meta)
    with _USED.pushed((operation, meta), jax.nn, "dot_product_attention", dot_product_attention):
        yield


def _with_batch(name: str, x: ArrayLike) -> jax.Array:
    array = jnp.asarray(x)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name} has shape {array.shape}, but must be [B, length, heads, H] or [length, heads, H]")
    return array if array.ndim == 4 else array[None]


def _as_scores(name: str, x: ArrayLike) -> jax.Array:
    """An array that broadcasts to [B, N, T, S], with four axes."""
    array = jnp.asarray(x)
    if array.ndim > 4:
        raise ValueError(f"{name} has shape {array.shape}, but must broadcast to [B, N, T, S]")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _bias(bias: ArrayLike) -> jax.Array:
    array = _as_scores("bias", bias)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def _dense(mask: ArrayLike) -> Mask:
    array = _as_scores("mask", mask)
    if array.dtype != bool:
        raise ValueError(f"mask has dtype {array.dtype}, but must be boolean; an additive mask is a bias")
    return Dense(array)


def _window(size: int | tuple[int, int]) -> Mask:
    left, right = (size, size) if isinstance(size, int) else size
    return SlidingWindow(left, right, offset=0)


def _lengths(keys: tuple[int, ...], query_lengths: ArrayLike | None, key_lengths: ArrayLike | None) -> list[Mask]:
    """The mask of lengths, if there are any; ``keys`` is (B, S)."""
    if query_lengths is None and key_lengths is None:
        return []
    kv = jnp.full(keys[0], keys[1], jnp.int32) if key_lengths is None else jnp.asarray(key_lengths)
    return [Lengths(kv, None if query_lengths is None else jnp.asarray(query_lengths))]
