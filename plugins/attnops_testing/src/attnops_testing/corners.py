"""Cases in which kernels have been wrong: broadcast arrays, hidden tokens, ragged ends, callers' functions.

Each function compares the `Subject` with `vanilla`, which the rest of the suite compares with the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import ScoreFn
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.registry import OperationRegistry
from attnops.errors import Reason, UnsupportedError
from attnops.masks import Causal, KeyPadding, Lengths, MaskFn, Segments, SlidingWindow
from attnops.sharding import create_mesh
from attnops_testing.fit import Fit
from attnops_testing.not_finite import CASES, check_not_finite
from attnops_testing.runner import NotRunError, Subject

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.operation import BaseOperation
    from attnops.masks import Mask
    from attnops.typing import PyTree

T, D = 40, 8


def draw(*shape: int) -> jax.Array:
    """Numbers that depend only on the shape, float32 between −1.7 and 1.7."""
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.uniform(-1.7, 1.7, shape), jnp.float32)


def fitted(subject: Subject, *lengths: int) -> tuple[int, ...]:
    """Lengths rounded up to the multiple that the operation needs, and a head_dim that it serves, `D` by default."""
    fit = subject.fit
    return *(-(-n // fit.multiple) * fit.multiple for n in lengths), D if fit.D == Fit.D else fit.D


def agree(
    subject: Subject, function: Callable[..., jax.Array], *arguments: jax.Array, tile: tuple[int, int] = (1, 1)
) -> None:
    """Assert that ``function(operation, *arguments)`` and its gradients equal vanilla's.

    Args:
        subject: the operation.
        function: from an operation and the arguments to an output.
        *arguments: float32 arrays, for which gradients are compared.
        tile: queries and keys per tile, as multiples of the subject's block.
    """

    def run(operation: BaseOperation) -> dict[str, PyTree]:
        def value(*x: jax.Array) -> jax.Array:
            return function(operation, *x)

        if not subject.gradients:
            return {"output": jax.jit(value, compiler_options=subject.compiler_options)(*arguments)}

        def both(*x: jax.Array) -> dict[str, PyTree]:
            out, pull_back = jax.vjp(value, *x)
            return {"output": out, "gradients": pull_back(2 * out)}

        result: dict[str, PyTree] = jax.jit(both, compiler_options=subject.compiler_options)(*arguments)
        return result

    q, k = (n * subject.block for n in tile)
    actual = run(subject.make(subject.base.replace(block_q=q, block_k=k)))
    expected = run(OperationRegistry.create("attnops:vanilla", OperationMetadata(mode=subject.mode)))
    for (path, x), exact in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        largest = max(1.0, float(np.abs(exact).max()))
        np.testing.assert_allclose(
            x, exact, rtol=2e-5, atol=2e-5 * largest, err_msg=f"{jax.tree_util.keystr(path)} is not vanilla's"
        )


def partial_vmap(subject: Subject) -> None:
    """Under `jax.vmap` over some arguments, the others are shared by all slices, also if their batch is 1."""
    n, d = fitted(subject, 24)
    shapes = (1, n, 2, d), (1, n, 1, d), (1, n, 1, d)
    for mapped in ((0, None, None), (None, 0, None), (None, 0, 0)):
        qkv = [draw(*([3] * (axis is not None)), *shape) for axis, shape in zip(mapped, shapes, strict=True)]

        def call(operation: OperationImpl, *qkv: jax.Array, mapped: tuple[int | None, ...] = mapped) -> jax.Array:
            return jax.vmap(lambda *x: operation(*x, mask=Causal()).attention_outputs, in_axes=mapped)(*qkv)

        agree(subject, call, *qkv)


def nested_vmap(subject: Subject) -> None:
    """Under two `jax.vmap`, one over a bias, one over queries and a mask's numbers, each slice uses its own arrays."""
    n, d = fitted(subject, 24)
    q, k, v = draw(2, 2, n, 2, d), draw(2, n, 1, d), draw(2, n, 1, d)
    lengths = jnp.array([[5, n], [17, 0], [9, 1]])
    bias = draw(3, 1, 2, n, n)

    def call(operation: OperationImpl, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        def one(q: jax.Array, lengths: jax.Array, bias: jax.Array) -> jax.Array:
            mask = Lengths(lengths) & SlidingWindow(9, 3)
            return operation(q, k, v, mask=mask, bias=bias).attention_outputs

        return jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, None))(q, lengths, bias)

    agree(subject, call, q, k, v, bias)


def _hidden(subject: Subject, **changed: Any) -> None:
    n, d = fitted(subject, T)
    hidden = np.arange(n)[None, :] >= np.array([30, n])[:, None]
    q, k, v, t = draw(2, n, 2, d), draw(2, n, 2, d), draw(2, n, 2, d), draw(n) + 3
    k, v = (jnp.where(hidden[:, :, None, None], jnp.nan, x) for x in (k, v))

    def call(operation: Any, q: jax.Array, t: jax.Array) -> jax.Array:
        bias = {"bias": ScoreFn(lambda s, b, h, q, kv, t: s * t[q], (t,))} if not changed else {}
        mask = Lengths(np.array([30, n]))
        return operation(q, k, v, mask=mask, **bias, **changed).attention_outputs + 0 * t.sum()

    agree(subject, call, q, t)


def hidden_and_capped(subject: Subject) -> None:
    """Gradients are finite where tokens that no query sees hold NaN and scores are capped."""
    _hidden(subject, logits_soft_cap=5.0)


def hidden_and_changed(subject: Subject) -> None:
    """Gradients are finite where tokens that no query sees hold NaN and a `ScoreFn` changes scores."""
    _hidden(subject)


def finite_at_every_index(subject: Subject) -> None:
    """A function is evaluated only at tokens that exist; at others it might divide by zero."""
    n, d = fitted(subject, T)
    for by_query in (True, False):

        def call(
            operation: OperationImpl, q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, by_query: bool = by_query
        ) -> jax.Array:
            def fn(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array, t: jax.Array) -> jax.Array:
                return s / t[q if by_query else kv] + jnp.sqrt((float(n) - kv) + q)

            return operation(q, k, v, bias=ScoreFn(fn, (t,))).attention_outputs

        agree(subject, call, draw(1, n, 1, d), draw(1, n, 1, d), draw(1, n, 1, d), draw(n) + 3)


def functions(subject: Subject) -> None:
    """A `ScoreFn` need not depend on the score or its indices, and may use values that it captures."""
    n, d = fitted(subject, 24)
    captured = jnp.float32(1.7)
    scaled = jax.jit(lambda x: x * captured)
    fns: tuple[Callable[..., jax.Array], ...] = (
        lambda s, b, h, q, kv, t: 0 * s + t[kv],  # only of keys
        lambda s, b, h, q, kv, t: jnp.zeros_like(s) + t[0],  # of nothing
        lambda s, b, h, q, kv, t: scaled(s) * t[q],
        lambda s, b, h, q, kv, t: s + jax.nn.relu(t[q]) * t[kv],  # with a custom derivative, computed per token
    )
    for fn in fns:

        def call(
            operation: OperationImpl, q: jax.Array, v: jax.Array, t: jax.Array, fn: Callable[..., jax.Array] = fn
        ) -> jax.Array:
            return operation(q, q, v, bias=ScoreFn(fn, (t,)), mask=Causal()).attention_outputs

        agree(subject, call, draw(1, n, 1, d), draw(1, n, 1, d), draw(n))


def custom_derivatives(subject: Subject) -> None:
    """A custom derivative of a `ScoreFn` is used, or the function is refused."""
    straight_through = jax.custom_jvp(lambda x: jnp.round(x))
    straight_through.defjvp(lambda x, dx: (jnp.round(x[0]), dx[0]))
    # A function of learnt values and of integers, whose custom derivative differs from that of its value.
    mixed = jax.custom_jvp(lambda x, y, i: x * y + jnp.where(i % 2 == 0, 0.5, 0.0))
    mixed.defjvp(lambda given, d: (mixed(*given), 3 * d[0] * given[1] - jnp.where(given[2] > 3, d[1], 0.0)))

    def call(operation: OperationImpl, q: jax.Array, t: jax.Array) -> jax.Array:
        def changed(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array, t: jax.Array) -> jax.Array:
            return (
                0.1 * straight_through(3.3 * s) + jax.nn.relu(s) + jax.nn.softplus(s - t[q]) + mixed(s, t[kv], q - kv)
            )

        return operation(q, q, q, bias=ScoreFn(changed, (t,))).attention_outputs

    n, d = fitted(subject, 24)
    agree(subject, call, draw(1, n, 1, d), draw(n))


def masks_with_one_row(subject: Subject) -> None:
    """A mask whose arrays have one row, [1, T], applies to every batch row."""
    n, d = fitted(subject, 24)
    ids = np.repeat(np.arange(3), [5, 11, n - 16])[None]
    refused: list[Reason] = []
    served = False
    for mask in (Segments(ids), Causal() & Segments(jnp.asarray(ids)), KeyPadding(ids > 0)):

        def call(operation: OperationImpl, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = mask) -> jax.Array:
            return operation(q, k, v, mask=mask).attention_outputs

        try:
            agree(subject, call, draw(2, n, 2, d), draw(2, n, 1, d), draw(2, n, 1, d))
            served = True
        except UnsupportedError as error:
            refused += error.reasons
    if not served:
        raise UnsupportedError("it refuses every mask of tokens", refused)


def unequal_tiles(subject: Subject) -> None:
    """Windows per head, grouped heads and learnt biases are right in tiles of fewer queries than keys, and of more."""
    windows = np.array([[3, 11, 24, 40]])

    def call(operation: OperationImpl, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return operation(q, k, v, mask=SlidingWindow(windows, 2), bias=bias).attention_outputs

    n, more, d = fitted(subject, T, 56)
    for tile in ((1, 2), (2, 1)):
        agree(subject, call, draw(2, n, 4, d), draw(2, more, 2, d), draw(2, more, 2, d), draw(1, 4, 1, more), tile=tile)


def large_soft_cap(subject: Subject) -> None:
    """A cap far above the scores changes them no more than rounding does: tanh does not lose digits."""

    def call(operation: OperationImpl, q: jax.Array) -> jax.Array:
        return operation(q, q, q, logits_soft_cap=1e5, mask=Causal()).attention_outputs

    n, d = fitted(subject, 24)
    agree(subject, call, draw(1, n, 1, d))


def unsigned_lookups(subject: Subject) -> None:
    """Values that a function looks up keep their dtype: unsigned numbers above 2 ** 31 don't become negative."""
    n, d = fitted(subject, 24)
    numbers = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32))

    def call(operation: OperationImpl, q: jax.Array) -> jax.Array:
        mask = MaskFn(lambda b, h, q, kv, x: (x[q] <= x[kv]) | (q == kv), (numbers,))
        return operation(q, q, q, mask=mask).attention_outputs

    agree(subject, call, draw(1, n, 1, d))


# Masks, biases and sinks with arrays that a mesh shards along batch, heads or both.
_ON_A_MESH: Final = (("Lengths", "ALiBi"), ("mask per head", "ScoreFn"), ("mask per batch", "sinks"), ("MaskFn", "GQA"))
# Combinations for an operation that refuses all of `_ON_A_MESH`.
_LESS_ON_A_MESH: Final = (("Causal", "GQA"), ())


def mesh(subject: Subject) -> None:
    """Results are right on a mesh that shards batch and heads; needs four devices."""
    devices = jax.devices()
    if len(devices) < 4:
        raise NotRunError(f"needs 4 devices, and has {len(devices)}: set JAX_NUM_CPU_DEVICES=4")
    metadata = subject.base.replace(mesh=create_mesh((2, 2), ("dp", "tp"), devices=devices[:4]))
    refused: list[Reason] = []
    for rows in (_ON_A_MESH, _LESS_ON_A_MESH):
        served = False
        for names in rows:
            problem = subject.problem(names, metadata=metadata)
            operation = subject.make(problem.metadata)
            if reasons := problem.reasons(operation):
                refused += reasons
                continue
            problem.check(operation, subject.gradients, subject.compiler_options)
            served = True
        if served:
            return
    raise UnsupportedError("it refuses every call that a mesh shards", refused)


def not_finite(subject: Subject) -> None:
    """A bias or sink of +inf or NaN makes its row NaN, and no other."""
    metadata = subject.base.replace(block_q=subject.block, block_k=subject.block)
    for case in CASES:
        operation, max_logits = subject.make(metadata), "max logits" in subject.served
        try:
            check_not_finite(operation, case, sinks=True, gradients=subject.gradients, max_logits=max_logits)
        except UnsupportedError:
            check_not_finite(operation, case, sinks=False, gradients=subject.gradients, max_logits=max_logits)


CORNERS: Final[dict[str, Callable[[Subject], None]]] = {
    "vmap of some arguments": partial_vmap,
    "nested vmap": nested_vmap,
    "NaN behind Lengths, capped": hidden_and_capped,
    "NaN behind Lengths, ScoreFn": hidden_and_changed,
    "ScoreFn of existing tokens": finite_at_every_index,
    "ScoreFn of fewer arguments": functions,
    "ScoreFn with its own derivative": custom_derivatives,
    "masks of one row": masks_with_one_row,
    "unequal tiles": unequal_tiles,
    "mesh": mesh,
    "large soft cap": large_soft_cap,
    "MaskFn of unsigned integers": unsigned_lookups,
    "bias of +inf and NaN": not_finite,
}
