"""flash-attn's functions computed by attnops' operations: the names, shapes and conventions of flash-attn 2.8.

::

    from attnops_adapters.flash_attn import flash_attn_func, flash_attn_varlen_func

    out = flash_attn_func(q, k, v, causal=True, window_size=(1023, 0))  # [batch, seqlen, heads, head_dim]
    out = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal=True)  # [total, heads, …]

Causal masks and windows are aligned at the bottom right: the last query is at the last key.

Differences:

| | flash-attn | here |
|---|---|---|
| dtypes, head dims, devices | float16, bfloat16; up to 256; CUDA or ROCm | also float32; any; all of JAX's |
| ``dropout_p`` | by PyTorch's generator | needs ``dropout_key``, a keyword; refused without |
| the logsumexp of a fully masked row | +inf | −inf |
| ``return_attn_probs`` | (out, softmax_lse, S_dmask) | (out, softmax_lse, None); refused with dropout |
| ``deterministic``, ``num_splits`` | speed against determinism | all results are deterministic; no effect |
| ``max_seqlen_q``, ``max_seqlen_k`` | bound the computation | too small ones are refused, if known; else no effect |
| ``cu_seqlens`` that decrease, or end after the tokens | undefined | refused, if known; see `attnops.OperationImpl` |
| tokens after ``cu_seqlens[-1]`` | undefined | output 0, gradients 0 |
| ``alibi_slopes`` [batch, heads] of varlen functions; their ``block_table`` | computed | refused |
| ``flash_attn_with_kvcache`` with ``k`` and ``v`` | writes to the caches | returns new caches after the output |
| the same with rotary embeddings and ``cache_leftpad`` | computed | refused |
| the same over pages | reads them in place; pages of a multiple of 256 tokens | gathers them; pages of any size |

For caches that kernels read in place, use attnops-caches. Every function has the keywords ``operation``, the name of an
attnops operation, and ``metadata``, an `attnops.OperationMetadata` without layout, scale, soft cap and dropout, which
the function's arguments determine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_adapters.flash_attn_cache import flash_attn_with_kvcache
from attnops_adapters.flash_attn_options import alibi, attend, band, flag

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops import OperationMetadata

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


def flash_attn_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: jax.Array | None = None,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
) -> Any:
    """Attention of a batch of sequences of equal lengths.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        k: [batch, seqlen_k, kv heads, head_dim].
        v: [batch, seqlen_k, kv heads, head_dim].
        dropout_p: the probability that a weight is dropped.
        softmax_scale: None for ``head_dim ** -0.5``.
        causal: whether query i sees key j only where ``j <= i + seqlen_k - seqlen_q``.
        window_size: (left, right): query i sees key j where ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k -
            seqlen_q + right``; a negative number is no limit. With ``causal``, right is 0.
        softcap: the soft cap of the scores; 0 or less for none.
        alibi_slopes: [heads] or [batch, heads]; adds ``-slope * |i + seqlen_k - seqlen_q - j|``.
        deterministic: no effect.
        return_attn_probs: whether to return (out, softmax_lse [batch, heads, seqlen_q] float32, None).
        dropout_key: a PRNG key, needed with ``dropout_p``.
        operation: the operation's name.
        metadata: further settings, such as platform and mesh.

    Returns:
        [batch, seqlen_q, heads, head_dim]. A query that sees no key has 0.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value, or can't be honoured.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) != 4:
            raise ValueError(f"{name} has shape {jnp.shape(x)}, but must be [batch, seqlen, heads, head_dim]")
    (batch, T, heads, _), S = jnp.shape(q), jnp.shape(k)[1]
    offset = jnp.full(batch, S - T, jnp.int32) if alibi_slopes is not None and jnp.ndim(alibi_slopes) == 2 else None
    return _finished(
        q, k, v, dropout_p, deterministic, return_attn_probs, softmax_scale=softmax_scale, softcap=softcap,
        mask=band(causal, window_size), bias=alibi(alibi_slopes, heads, batch, offset), dropout_key=dropout_key,
        operation=operation, metadata=metadata,
    )  # fmt: skip


def flash_attn_qkvpacked_func(qkv: ArrayLike, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of ``qkv`` [batch, seqlen, 3, heads, head_dim]; the other arguments follow in its order."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: ArrayLike, kv: ArrayLike, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of ``kv`` [batch, seqlen_k, 2, kv heads, head_dim]; the other arguments follow in its order."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: ArrayLike | None = None,
    *,
    dropout_key: jax.Array | None = None,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
) -> Any:
    """Attention of sequences of different lengths, one after the other.

    Args:
        q: [total_q, heads, head_dim].
        k: [total_k, kv heads, head_dim].
        v: [total_k, kv heads, head_dim].
        cu_seqlens_q: integers [batch + 1], the cumulative lengths of the queries' sequences.
        cu_seqlens_k: integers [batch + 1], the cumulative lengths of the keys' sequences.
        max_seqlen_q: the length of the longest sequence of queries, or more.
        max_seqlen_k: the length of the longest sequence of keys, or more.
        dropout_p: the probability that a weight is dropped.
        softmax_scale: None for ``head_dim ** -0.5``.
        causal: whether no query sees a later key, with i and j aligned at the end of each sequence.
        window_size: (left, right), keys before and after a query, aligned likewise; a negative number is no limit.
        softcap: the soft cap of the scores; 0 or less for none.
        alibi_slopes: [heads]; adds ``-slope · |distance|``.
        deterministic: no effect.
        return_attn_probs: whether to return (out, softmax_lse [heads, total_q] float32, None).
        block_table: None; pages are refused.
        dropout_key: a PRNG key, needed with ``dropout_p``.
        operation: the operation's name.
        metadata: further settings, such as platform and mesh.

    Returns:
        [total_q, heads, head_dim].

    Raises:
        ValueError: an argument has a wrong shape, dtype or value, or can't be honoured.
    """
    if block_table is not None:
        raise ValueError(
            "block_table is given, but varlen functions have no pages here; use flash_attn_with_kvcache, or a "
            "PagedCache of attnops-caches with rows=Rows(...)"
        )
    if jnp.ndim(q) != 3:
        raise ValueError(f"q has shape {jnp.shape(q)}, but must be [total_q, heads, head_dim]")
    for name, ends, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        _check_longest(name, ends, most)
    return _finished(
        q, k, v, dropout_p, deterministic, return_attn_probs, softmax_scale=softmax_scale, softcap=softcap,
        mask=band(causal, window_size), bias=alibi(alibi_slopes, jnp.shape(q)[-2], None), dropout_key=dropout_key,
        operation=operation, metadata=metadata, layout="THD", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayLike, cu_seqlens: ArrayLike, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of ``qkv`` [total, 3, heads, head_dim]; the other arguments follow in its order."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(q: ArrayLike, kv: ArrayLike, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` of ``kv`` [total_k, 2, kv heads, head_dim]; the other arguments follow in its order."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(q, k, v, *args, **options)


def _finished(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, dropout_p: float, deterministic: object, return_attn_probs: object,
    **options: Any,
) -> Any:  # fmt: skip
    flag("deterministic", deterministic)
    wanted = flag("return_attn_probs", return_attn_probs)
    if wanted and dropout_p:
        raise ValueError(
            f"return_attn_probs=True with dropout_p={dropout_p} would need S_dmask, which shows what was dropped; give "
            f"dropout_p=0.0, or an attnops operation with return_weights=True"
        )
    out = attend(q, k, v, dropout_p=dropout_p, **options)
    if not wanted:
        return out.attention_outputs
    # As in flash-attn, the logsumexp has no gradient.
    return out.attention_outputs, jax.lax.stop_gradient(out.logsumexp), None


def _unpacked(name: str, x: ArrayLike, parts: int, rank: int) -> list[jax.Array]:
    array = jnp.asarray(x)
    if array.ndim != rank or array.shape[-3] != parts:
        letters = "[batch, seqlen" if rank == 5 else "[total"
        raise ValueError(f"{name} has shape {array.shape}, but must be {letters}, {parts}, heads, head_dim]")
    return [array[..., i, :, :] for i in range(parts)]


def _check_longest(name: str, ends: ArrayLike, most: object) -> None:
    if not isinstance(most, (int, np.integer)) or isinstance(most, bool):
        raise ValueError(f"max_seqlen_{name}={most!r} must be an int known when tracing")
    if isinstance(ends, jax.core.Tracer):
        return
    known = np.asarray(ends)
    longest = int(np.diff(known.astype(np.int64)).max(initial=0)) if known.ndim == 1 and known.dtype.kind in "iu" else 0
    if longest > most:
        raise ValueError(
            f"max_seqlen_{name}={most}, but a sequence of cu_seqlens_{name} has {longest} tokens: give at least that"
        )
