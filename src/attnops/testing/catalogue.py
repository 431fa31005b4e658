"""What a kernel's tests compile ahead of time: each head dim, length and feature of the contract, forward and backward.

compile_for(CASES["window"].program("attnops-tpu:flash", "tpu"), CASES["window"].example, "v6e")
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops.masks import Causal, Chunked, Dense, KeyPadding, Lengths, MaskFn, PrefixLM, Segments, SlidingWindow

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of attention, forward and backward.

    Attributes:
        T, S, B, H, K, D, Dv: dimensions; S and Dv None for T and D.
        dtype: of query, key and value.
        mask: what makes the mask, of the arrays of ``traced``.
        traced: arrays of the mask that are known at run time only.
        bias: what makes the bias, of the arrays of ``learnt``.
        learnt: arrays of the bias, which have gradients.
        sinks, dropout, cap: the contract's.
    """

    T: int = 2048
    S: int | None = None
    B: int = 1
    H: int = 8
    K: int = 8
    D: int = 128
    Dv: int | None = None
    dtype: Any = jnp.bfloat16
    mask: Callable[..., Any] | None = None
    traced: tuple[Shape, ...] = ()
    bias: Callable[..., Any] | None = None
    learnt: tuple[Shape, ...] = ()
    sinks: bool = False
    dropout: float = 0.0
    cap: float | None = None

    @property
    def example(self) -> tuple[dict[str, Any], tuple[Shape, ...]]:
        """What the program takes, as shapes and dtypes."""
        S, Dv = self.S or self.T, self.Dv or self.D
        shapes = (self.B, self.T, self.H, self.D), (self.B, S, self.K, self.D), (self.B, S, self.K, Dv)
        found = {"qkv": tuple(Shape(shape, self.dtype) for shape in shapes), "learnt": self.learnt}
        return found | ({"sinks": Shape((self.H,), jnp.float32)} if self.sinks else {}), self.traced

    def program(self, name: str, platform: str) -> Callable[..., Any]:
        """A function of `example` that gives output, logsumexp and all gradients.

        Args:
            name: of the operation; what it refuses raises.
            platform: its platform.
        """
        metadata = OperationMetadata(platform=platform, on_unsupported="error", dropout_prob=self.dropout, mode="train")
        operation: Any = OperationRegistry.create(name, metadata)

        def program(arguments: dict[str, Any], traced: tuple[jax.Array, ...]) -> Any:
            def run(a: dict[str, Any]) -> Any:
                found = operation(
                    *a["qkv"], mask=self.mask(*traced) if self.mask else None, sinks=a.get("sinks"), return_lse=True,
                    bias=self.bias(*a["learnt"]) if self.bias else None, logits_soft_cap=self.cap,
                    dropout_key=jax.random.key(0) if self.dropout else None,
                )  # fmt: skip
                return found.attention_outputs, found.logsumexp

            outputs, pull_back = jax.vjp(run, arguments)
            return outputs, pull_back(jax.tree.map(jnp.ones_like, outputs))

        return program


def ids(T: int = 2048) -> Shape:
    return Shape((1, T), jnp.int32)


def floats(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def causal_segments(ids: Any) -> Any:
    return Causal() & Segments(ids)


def every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 != 0


def pattern(scores: Any, b: Any, h: Any, q: Any, kv: Any, factors: Any, offsets: Any) -> Any:
    changed = jnp.tanh(scores) + 0.1 * jax.nn.softplus(scores)  # whose derivative is its own
    return changed * offsets[q] + factors[h] * ((q + 2 * kv) // 3).astype(scores.dtype)


CASES = {
    "plain": Case(),
    "causal": Case(mask=Causal),
    "float32": Case(dtype=jnp.float32, mask=Causal),
    "float32, D 256": Case(dtype=jnp.float32, D=256),
    "D 64": Case(D=64),
    "D 80": Case(D=80),
    "D 96": Case(D=96),
    "D 192, Dv 128": Case(D=192, Dv=128, mask=Causal),
    "D 256": Case(D=256),
    "D 576, Dv 512": Case(D=576, Dv=512, H=4, K=1, mask=Causal),
    "D 8": Case(D=8),
    "D 5, Dv 3": Case(D=5, Dv=3),
    "float16": Case(dtype=jnp.float16, mask=Causal),
    "T 1": Case(T=1, S=2048),
    "T 1, grouped": Case(T=1, S=2048, K=1, B=4),
    "T 113": Case(T=113),
    "T 1000, S 3000": Case(T=1000, S=3000, mask=Causal),
    "T 3000, S 1000": Case(T=3000, S=1000, mask=Causal),
    "T 32768": Case(T=32768, mask=Causal),
    "T 32768, 1 kv head": Case(T=32768, K=1, mask=Causal),
    "T 32768, 1 kv head, D 256": Case(T=32768, K=1, D=256, mask=Causal),
    "131072 tokens, window of 4096": Case(T=131072, H=2, K=2, mask=lambda: Causal() & SlidingWindow(4095, 0)),
    "131072 tokens, documents": Case(T=131072, H=2, K=1, mask=causal_segments, traced=(ids(131072),)),
    "1 kv head": Case(K=1, mask=Causal),
    "2 kv heads": Case(K=2, mask=Causal),
    "window": Case(mask=lambda: Causal() & SlidingWindow(255, 0)),
    "window per head": Case(mask=lambda: SlidingWindow(np.arange(1, 9)[None] * 100, 0)),
    "chunked": Case(mask=lambda: Causal() & Chunked(500)),
    "prefix": Case(mask=lambda: PrefixLM(100)),
    "documents": Case(mask=causal_segments, traced=(ids(),)),
    "static documents": Case(mask=lambda: Causal() & Segments(np.arange(2048) // 300)),
    "lengths": Case(B=2, mask=Lengths, traced=(Shape((2,), jnp.int32),)),
    "padding": Case(mask=KeyPadding, traced=(Shape((1, 2048), jnp.bool_),)),
    "dense mask": Case(mask=Dense, traced=(Shape((1, 1, 2048, 2048), jnp.bool_),)),
    "traced offset": Case(mask=lambda x: Causal(offset=x), traced=(Shape((1, 1), jnp.int32),)),
    "positions": Case(mask=lambda x: Causal().at(x, x), traced=(ids(),)),
    "MaskFn": Case(mask=lambda: Causal() & MaskFn(every_third)),
    "or, not": Case(mask=lambda: ~Causal() | SlidingWindow(100, 100)),
    "bias": Case(bias=jnp.asarray, learnt=(Shape((1, 8, 2048, 2048), jnp.bfloat16),)),
    "shared bias": Case(B=2, bias=jnp.asarray, learnt=(floats(1, 1, 2048, 2048),)),
    "bias by key": Case(bias=jnp.asarray, learnt=(floats(1, 8, 1, 2048),)),
    "bias by query": Case(bias=jnp.asarray, learnt=(floats(1, 8, 2048, 1),)),
    "ALiBi": Case(mask=Causal, bias=lambda slopes: ALiBi(slopes), learnt=(floats(8),)),
    "constant ALiBi": Case(mask=Causal, bias=lambda: ALiBi(alibi_slopes(8))),
    "relative position": Case(bias=RelativePosition, learnt=(floats(32, 8),)),
    "relative position, T 32768": Case(T=32768, bias=RelativePosition, learnt=(floats(32, 8),)),
    "ScoreFn": Case(bias=lambda *x: ScoreFn(pattern, x), learnt=(floats(8), floats(2048))),
    "soft cap": Case(cap=50.0, mask=Causal),
    "sinks": Case(sinks=True, mask=Causal),
    "dropout": Case(dropout=0.1, mask=Causal),
    "everything": Case(
        T=1500, K=2, D=80, Dv=96, mask=causal_segments, traced=(ids(1500),), bias=ALiBi, learnt=(floats(8),),
        sinks=True, dropout=0.1, cap=30.0,
    ),
}  # fmt: skip

# Cases that have code of their own in most kernels; the others repeat much of what these compile.
DISTINCT: Final = (
    "causal",
    "float32, D 256",
    "D 64",
    "D 192, Dv 128",
    "D 576, Dv 512",
    "D 5, Dv 3",
    "T 1",
    "T 1000, S 3000",
    "131072 tokens, documents",
    "window per head",
    "documents",
    "dense mask",
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
    """For each case of `DISTINCT` one of the targets, in turn."""
    return dict(zip(DISTINCT, itertools.cycle(targets), strict=False))
