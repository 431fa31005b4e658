"""Calls of real sizes, forward and backward, which tests of kernels compile ahead of time but do not run::

compile_for(CASES["window"].program("attnops-tpu:flash", "tpu"), CASES["window"].example, "v6e")
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops.masks import Blocks, Causal, Chunked, Dense, KeyPadding, Lengths, MaskFn, PrefixLM, Segments, SlidingWindow

if TYPE_CHECKING:
    from attnops.biases import Bias
    from attnops.masks import Mask
    from attnops.typing import Function, PyTree

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCase:
    """A call of attention, forward and backward.

    Attributes:
        T, S, B, H, K, D, Dv: dimensions; S=None means T, Dv=None means D.
        dtype: the dtype of query, key and value.
        mask: makes the mask from the arrays of ``traced``.
        traced: shapes and dtypes of the mask's arrays, which are arguments of the program.
        bias: makes the bias from the arrays of ``learnt``.
        learnt: shapes and dtypes of the bias's arrays, which have gradients.
        sinks: whether the call has sinks, [H].
        dropout: the probability of dropout.
        cap: the soft cap; None for none.
        max_logits: whether the call asks for the largest scores.
    """

    T: int = 2048
    S: int | None = None
    B: int = 1
    H: int = 8
    K: int = 8
    D: int = 128
    Dv: int | None = None
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    mask: Callable[..., Mask] | None = None
    traced: tuple[Shape, ...] = ()
    bias: Callable[..., jax.Array | Bias] | None = None
    learnt: tuple[Shape, ...] = ()
    sinks: bool = False
    dropout: float = 0.0
    cap: float | None = None
    max_logits: bool = False

    @property
    def example(self) -> tuple[dict[str, object], tuple[Shape, ...]]:
        """The program's arguments, as shapes and dtypes."""
        S, Dv = self.S or self.T, self.Dv or self.D
        shapes = (self.B, self.T, self.H, self.D), (self.B, S, self.K, self.D), (self.B, S, self.K, Dv)
        arguments = {"qkv": tuple(Shape(shape, self.dtype) for shape in shapes), "learnt": self.learnt}
        return arguments | ({"sinks": Shape((self.H,), jnp.float32)} if self.sinks else {}), self.traced

    def program(self, name: str, platform: str) -> Function:
        """A function of `example` that returns output, logsumexp, largest scores and all gradients.

        Args:
            name: the operation's name; it raises for calls that it does not support.
            platform: the platform of the forward, such as "tpu".
        """
        metadata = OperationMetadata(platform=platform, on_unsupported="error", dropout_prob=self.dropout, mode="train")
        operation: Any = OperationRegistry.create(name, metadata)

        def program(arguments: dict[str, PyTree], traced: tuple[jax.Array, ...]) -> tuple[object, object]:
            def run(a: dict[str, PyTree]) -> tuple[jax.Array | None, ...]:
                output = operation(
                    *a["qkv"], mask=self.mask(*traced) if self.mask else None, sinks=a.get("sinks"), return_lse=True,
                    bias=self.bias(*a["learnt"]) if self.bias else None, logits_soft_cap=self.cap,
                    dropout_key=jax.random.key(0) if self.dropout else None, return_max_logits=self.max_logits,
                )  # fmt: skip
                return output.attention_outputs, output.logsumexp, output.max_logits

            outputs, pull_back = jax.vjp(run, arguments)
            return outputs, pull_back(jax.tree.map(jnp.ones_like, outputs))

        return program


def ids(T: int = 2048) -> Shape:
    return Shape((1, T), jnp.int32)


def floats(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def causal_segments(ids: jax.Array) -> Mask:
    return Causal() & Segments(ids)


def causal_blocks(chosen: jax.Array) -> Mask:
    return Causal() & Blocks(chosen, 128, 128)


def every_third(b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
    return (q - kv) % 3 != 0


def pattern(
    scores: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array, factors: jax.Array, offsets: jax.Array
) -> jax.Array:
    changed = jnp.tanh(scores) + 0.1 * jax.nn.softplus(scores)  # softplus has a custom derivative
    return changed * offsets[q] + factors[h] * ((q + 2 * kv) // 3).astype(scores.dtype)


CASES = {
    "plain": CompileCase(),
    "causal": CompileCase(mask=Causal),
    "float32": CompileCase(dtype=jnp.float32, mask=Causal),
    "float32, D 256": CompileCase(dtype=jnp.float32, D=256),
    "D 64": CompileCase(D=64),
    "D 80": CompileCase(D=80),
    "D 96": CompileCase(D=96),
    "D 192, Dv 128": CompileCase(D=192, Dv=128, mask=Causal),
    "D 256": CompileCase(D=256),
    "D 576, Dv 512": CompileCase(D=576, Dv=512, H=4, K=1, mask=Causal),
    "D 8": CompileCase(D=8),
    "D 5, Dv 3": CompileCase(D=5, Dv=3),
    "float16": CompileCase(dtype=jnp.float16, mask=Causal),
    "T 1": CompileCase(T=1, S=2048),
    "T 1, grouped": CompileCase(T=1, S=2048, K=1, B=4),
    "T 113": CompileCase(T=113),
    "T 1000, S 3000": CompileCase(T=1000, S=3000, mask=Causal),
    "T 3000, S 1000": CompileCase(T=3000, S=1000, mask=Causal),
    "T 32768": CompileCase(T=32768, mask=Causal),
    "T 32768, 1 kv head": CompileCase(T=32768, K=1, mask=Causal),
    "T 32768, 1 kv head, D 256": CompileCase(T=32768, K=1, D=256, mask=Causal),
    "131072 tokens, window of 4096": CompileCase(T=131072, H=2, K=2, mask=lambda: Causal() & SlidingWindow(4095, 0)),
    "131072 tokens, documents": CompileCase(T=131072, H=2, K=1, mask=causal_segments, traced=(ids(131072),)),
    "1 kv head": CompileCase(K=1, mask=Causal),
    "2 kv heads": CompileCase(K=2, mask=Causal),
    "window": CompileCase(mask=lambda: Causal() & SlidingWindow(255, 0)),
    "window per head": CompileCase(mask=lambda: SlidingWindow(np.arange(1, 9)[None] * 100, 0)),
    "chunked": CompileCase(mask=lambda: Causal() & Chunked(500)),
    "prefix": CompileCase(mask=lambda: PrefixLM(100)),
    "documents": CompileCase(mask=causal_segments, traced=(ids(),)),
    "static documents": CompileCase(mask=lambda: Causal() & Segments(np.arange(2048) // 300)),
    "lengths": CompileCase(B=2, mask=Lengths, traced=(Shape((2,), jnp.int32),)),
    "padding": CompileCase(mask=KeyPadding, traced=(Shape((1, 2048), jnp.bool_),)),
    "dense mask": CompileCase(mask=Dense, traced=(Shape((1, 1, 2048, 2048), jnp.bool_),)),
    "chosen blocks": CompileCase(mask=causal_blocks, traced=(Shape((1, 8, 16, 16), jnp.bool_),)),
    "chosen blocks of 64 keys by query": CompileCase(
        mask=lambda x: Causal() & Blocks(x, 1, 64), traced=(Shape((1, 2, 2048, 16), jnp.int32),)
    ),
    "traced offset": CompileCase(mask=lambda x: Causal(offset=x), traced=(Shape((1, 1), jnp.int32),)),
    "positions": CompileCase(mask=lambda x: Causal().at(x, x), traced=(ids(),)),
    "MaskFn": CompileCase(mask=lambda: Causal() & MaskFn(every_third)),
    "or, not": CompileCase(mask=lambda: ~Causal() | SlidingWindow(100, 100)),
    "bias": CompileCase(bias=jnp.asarray, learnt=(Shape((1, 8, 2048, 2048), jnp.bfloat16),)),
    "shared bias": CompileCase(B=2, bias=jnp.asarray, learnt=(floats(1, 1, 2048, 2048),)),
    "bias by key": CompileCase(bias=jnp.asarray, learnt=(floats(1, 8, 1, 2048),)),
    "bias by query": CompileCase(bias=jnp.asarray, learnt=(floats(1, 8, 2048, 1),)),
    "ALiBi": CompileCase(mask=Causal, bias=lambda slopes: ALiBi(slopes), learnt=(floats(8),)),
    "constant ALiBi": CompileCase(mask=Causal, bias=lambda: ALiBi(alibi_slopes(8))),
    "relative position": CompileCase(bias=RelativePosition, learnt=(floats(32, 8),)),
    "relative position, T 32768": CompileCase(T=32768, bias=RelativePosition, learnt=(floats(32, 8),)),
    "ScoreFn": CompileCase(bias=lambda *x: ScoreFn(pattern, x), learnt=(floats(8), floats(2048))),
    "soft cap": CompileCase(cap=50.0, mask=Causal),
    "sinks": CompileCase(sinks=True, mask=Causal),
    "dropout": CompileCase(dropout=0.1, mask=Causal),
    "everything": CompileCase(
        T=1500, K=2, D=80, Dv=96, mask=causal_segments, traced=(ids(1500),), bias=ALiBi, learnt=(floats(8),),
        sinks=True, dropout=0.1, cap=30.0,
    ),
    "sinks, max logits": CompileCase(sinks=True, mask=Causal, max_logits=True),
}  # fmt: skip

# Cases for which most kernels have separate code; the other cases share most of their code with these.
DISTINCT: Final = (
    "causal",
    "D 64",
    "D 192, Dv 128",
    "D 576, Dv 512",
    "D 5, Dv 3",
    "T 1",
    "T 1000, S 3000",
    "window per head",
    "documents",
    "dense mask",
    "chosen blocks",
    "positions",
    "MaskFn",
    "bias",
    "bias by key",
    "relative position",
    "ScoreFn",
    "dropout",
    "everything",
)


def one_target_each(targets: Iterable[str]) -> dict[str, str]:
    """The cases of `DISTINCT`, each with one target, cycling through them."""
    return dict(zip(DISTINCT, itertools.cycle(targets), strict=False))
