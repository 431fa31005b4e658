"""Peers over the tokens of a cache: they read plain arrays, dequantised if the cache has a codec."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.case import Array, Refused
from attnops_testing.bench.program import Ready

if TYPE_CHECKING:
    from attnops.typing import PyTree


def jax_nn(case: CacheCase, what: str, implementation: Literal["cudnn"] | None = None) -> Ready:
    """`jax.nn.dot_product_attention` with ``key_value_seq_lengths``, and a mask array if lengths do not suffice."""
    tokens = case.tokens
    if tokens.latent is not None:
        raise Refused(f"it needs Dv = D, but the value is {tokens.latent} of {tokens.head_dim} features of the key")
    lengths = {"key_value_seq_lengths": jnp.asarray(tokens.lengths, jnp.int32)}
    if tokens.T > 1:
        lengths["query_seq_lengths"] = jnp.asarray(tokens.queries, jnp.int32)
    whole = is_whole_prompt(case)
    mask = None if whole or sees_all(case) else jnp.asarray(mask_array(case, tokens.S))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, lengths: PyTree) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=whole, implementation=implementation, **lengths
        )

    names = " and ".join([*lengths, *(["is_causal"] if whole else [] if mask is None else ["a mask array"])])
    return compiled(case, attend, (*tokens.plain(case.cache.codec), mask, lengths), f"{what} with {names}", plain=True)


def flax_nnx(case: CacheCase, what: str) -> Ready:
    """The function by which flax.nnx's `MultiHeadAttention` decodes: over all slots, with a mask array."""
    tokens = case.tokens
    if tokens.latent is not None:
        raise Refused(f"it needs Dv = D, but the value is {tokens.latent} of {tokens.head_dim} features of the key")
    nnx: Any = importlib.import_module("flax.nnx")
    mask = jnp.asarray(mask_array(case, tokens.S))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return nnx.dot_product_attention(q, k, v, mask=mask)

    arguments = (*tokens.plain(case.cache.codec), mask)
    return compiled(case, attend, arguments, f"{what} over all slots with a mask array", plain=True)


def torch(case: CacheCase, what: str) -> Ready:
    """Torch's SDPA over the slice of the arrays that is in use."""
    tokens = case.tokens
    if len(set(zip(tokens.lengths, tokens.queries, strict=True))) > 1:
        raise Refused(f"rows of {min(tokens.lengths)} to {max(tokens.lengths)} tokens must have one length")
    if jax.default_backend() != "cpu":
        raise Refused("over a cache it is measured on a CPU only")
    module: Any = importlib.import_module("torch")
    dtype, used = getattr(module, case.dtype), tokens.lengths[0]

    def tensor(x: jax.Array) -> Any:
        """[B, T, h, D] of JAX to [B, h, T, D]."""
        return module.from_numpy(np.array(x, np.float32)).to(dtype).transpose(1, 2).contiguous()

    query, key, value = map(tensor, tokens.plain(case.cache.codec))
    key, value = key[:, :, :used], value[:, :, :used]
    whole = is_whole_prompt(case)
    options: dict[str, Any] = {"is_causal": whole, "enable_gqa": True}
    if not whole and not sees_all(case):
        options["attn_mask"] = module.from_numpy(mask_array(case, used))

    def run() -> Any:
        with module.no_grad():
            return module.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    def results(d_out: Array) -> dict[str, Array]:
        return {"output": run().transpose(1, 2).float().numpy()}

    return Ready(
        run=run, wait=lambda outputs: outputs, results=results, what=f"{what} over the visible slice",
        bytes_seen=case.plain_bytes,
    )  # fmt: skip


def sees_all(case: CacheCase) -> bool:
    """Whether every query sees all tokens of its row."""
    return all(bool(case.seen(row).all()) for row in range(case.tokens.batch))


def is_whole_prompt(case: CacheCase) -> bool:
    """Whether each row is a prompt of several tokens, all of them queries, with a plain causal mask, for which peers
    have an option.
    """
    tokens = case.tokens
    if tokens.lengths != tokens.queries or tokens.T == 1:
        return False
    return all(bool((case.seen(row) == np.tri(count, dtype=bool)).all()) for row, count in enumerate(tokens.queries))


def mask_array(case: CacheCase, columns: int) -> Array:
    """Which keys each query sees, an array of bool [B, H or 1, T, columns].

    Raises:
        Refused: it needs more than the memory limit.
    """
    rows = [case.seen(row) for row in range(case.tokens.batch)]
    shape = (len(rows), max(x.shape[0] for x in rows), case.tokens.T, columns)
    case.check_memory(int(np.prod(shape)), "a mask as an array of T × S")
    mask = np.zeros(shape, bool)
    for row, x in enumerate(rows):
        mask[row, :, : x.shape[1], : x.shape[2]] = x
    return mask


def compiled(
    case: CacheCase, function: Any, arguments: tuple[Any, ...], what: str, *, plain: bool = False, donated: bool = False
) -> Ready:
    """A JAX function as a program.

    Args:
        case: the case.
        function: returns the output [B, T, H, Dv], or [1, N, H, Dv] for packed rows; [N, H, Dv] of all rows too.
        arguments: the function's arguments.
        what: what runs, for people to read.
        plain: whether the function reads plain arrays, never packed; False if it reads the cache.
        donated: whether the first argument is donated, and replaced by the second result: a kernel may update it.

    Raises:
        attnops_testing.bench.case.Refused: it needs more than the memory limit.
    """
    start = time.perf_counter()
    # All contenders multiply float32 matrices in full float32, as attnops does by default.
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        program = jax.jit(function, donate_argnums=0 if donated else ()).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    if memory is not None:
        sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
        case.check_memory(sum(sizes), "it")

    held, others = arguments[:1], arguments[1:]

    def run() -> jax.Array:
        nonlocal held
        if not donated:
            return program(*arguments)
        out, *held = program(*held, *others)
        return out

    def results(d_out: Array) -> dict[str, Array]:
        out = np.asarray(run())
        return {"output": out if plain and out.ndim == 4 else case.unpacked(out)}

    return Ready(
        run=run,
        wait=jax.block_until_ready,
        results=results,
        what=what,
        temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        compile_seconds=seconds,
        bytes_seen=case.plain_bytes if plain else case.stored_bytes,
    )
