"""Documents with infinities or NaN, which must not reach other documents of their row.

A chunk's product of matrices gives tokens of other documents the weight 0, and 0 · NaN is NaN. So such numbers are
replaced by 0 before it, and what they reach by the definition is set to NaN after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import folds_batch
from attnops_linear.masks import is_known
from attnops_linear.output import LinearOutput

# Divides the length of every implementation's chunks.
_PIECE: Final = 16


class Reached(NamedTuple):
    """What is NaN by the definition; bool.

    Attributes:
        query: [B, T, Hv], by the token's own query.
        since: [B, T, Hv], by another argument of the token, or of an earlier one of its document.
        continues: [B, T, 1], whether the token is of the document that the first state is of.
        state: [B, Hv], the first state.
    """

    query: jax.Array
    since: jax.Array
    continues: jax.Array
    state: jax.Array

    def mark(self, output: LinearOutput, value: jax.Array, is_token: jax.Array | None) -> LinearOutput:
        """The output with NaN; its tangents there are the tangents of ``value`` [B, T, Hv, Dv]."""
        since = self.since | (self.continues & self.state[:, None])
        tokens = since | self.query if is_token is None else (since | self.query) & is_token[:, :, None]
        spoiled = (value + jnp.where(tokens[..., None], jnp.nan, 0.0)).astype(output.attention_outputs.dtype)
        outputs = jnp.where(tokens[..., None], spoiled, output.attention_outputs)
        state = output.state
        return LinearOutput(outputs, None if state is None else jnp.where(since[:, -1, :, None, None], jnp.nan, state))


def separate(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Reached]:
    """The arguments of `LinearAttention.forward_native` with 0 for what is not finite, and what it reaches.

    ``mask`` says where documents begin, and T is at least 1.
    """
    is_token, starts = arrays["mask"]
    (B, T), H = arrays["query"].shape[:2], arrays["value"].shape[2]
    clean, of_token, query = dict(arrays), jnp.zeros((B, T, H), bool), jnp.zeros((B, T, H), bool)
    state = jnp.zeros((B, H), bool)
    for name in ("query", "key", "value", "decay", "beta", "initial_state"):
        x = arrays.get(name)
        if x is None:
            continue
        fine = jnp.isfinite(x) | (x == -jnp.inf) if name == "decay" else jnp.isfinite(x)
        clean[name] = jnp.where(fine, x, 0)
        if name == "initial_state":
            state = ~fine.all(axis=(2, 3))
            continue
        bad = ~fine.all(axis=3) if x.ndim == 4 else ~fine
        bad = bad if x.ndim == 1 else jnp.repeat(bad, H // bad.shape[2], axis=2)
        if name == "decay":  # a document's first token keeps nothing of the state
            bad = bad & ~starts[:, :, None]
        if name == "query":
            query = query | bad
        else:
            of_token = of_token | bad
    if is_token is not None:
        of_token = of_token & is_token[:, :, None]
    place = 1 + jnp.arange(T, dtype=jnp.int32)[:, None]
    first = lax.cummax(jnp.where(starts[:, :, None], place, 0), axis=1)
    since = lax.cummax(jnp.where(of_token, place, -1), axis=1) >= first
    return clean, Reached(query, since, first == 0, state)


def apart(forward: Callable[..., LinearOutput], arrays: Mapping[str, Any]) -> LinearOutput:
    """The output of a forward, in which no document's infinities or NaN reach another one."""
    clean, reached = separate(arrays)
    return reached.mark(forward(**clean), clean["value"], arrays["mask"].is_token)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is static about `_again`."""

    B: int
    forward: Callable[..., LinearOutput]


def apart_if_needed(forward: Callable[..., LinearOutput], arrays: Mapping[str, Any]) -> LinearOutput:
    """`apart`, by a second run of a kernel whose first one has a result that is not finite."""
    found, given = forward(**arrays), {name: x for name, x in arrays.items() if x is not None}
    if is_known(found.attention_outputs):
        return apart(forward, given) if _is_spoiled(found, given) else found
    decay, (B, T), H = given.get("decay"), given["query"].shape[:2], given["value"].shape[2]
    if decay is not None and decay.ndim == 1:
        given["decay"] = jnp.broadcast_to(decay, (B, T, H))
    result: LinearOutput = _again(_Kernel(B, forward), found, given)
    return result


@folds_batch
def _again(kernel: _Kernel, found: LinearOutput, arrays: dict[str, Any]) -> LinearOutput:
    # Arrays that the slices of a `jax.vmap` share have one row, and a kernel has the rows of all.
    found, arrays = jax.tree.map(lambda x: jnp.broadcast_to(x, (kernel.B, *x.shape[1:])), (found, arrays))
    # A loop keeps the first run's buffers; `jax.lax.cond` would copy them.
    again = _is_spoiled(found, arrays)
    result: LinearOutput = lax.while_loop(
        lambda carry: carry[0], lambda _: (jnp.zeros_like(again), apart(kernel.forward, arrays)), (again, found)
    )[1]
    return result


def _is_spoiled(found: LinearOutput, arrays: Mapping[str, Any]) -> jax.Array:
    """Whether a kernel's result is not finite.

    Each number that is not finite makes the outputs of the chunk's last token so, with the weight 0 or another one: a
    few outputs tell.
    """
    outputs, is_token = found.attention_outputs, arrays["mask"].is_token
    (B, T), N = outputs.shape[:2], -(-outputs.shape[1] // _PIECE)
    last = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    last = last if is_token is None else jnp.where(is_token, last, 0)
    last = jnp.pad(last, ((0, 0), (0, N * _PIECE - T))).reshape(B, N, _PIECE).max(axis=2)
    return ~jnp.isfinite(jnp.take_along_axis(outputs, last[:, :, None, None], axis=1)).all()
