"""`Case`: a call that is measured, with its arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import Mask, Segments
from attnops_testing.bench.machine import default_memory_limit

if TYPE_CHECKING:
    from attnops_testing.bench.truth import Truth

Array = np.ndarray[Any, Any]


class Refused(Exception):
    """A contender can't run a case; the message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One call of attention: random inputs of these shapes, T = S.

    Attributes:
        length: T and S, in tokens.
        batch: B.
        heads: H.
        kv_heads: K, a divisor of H; None for H.
        head_dim: D and Dv.
        dtype: the dtype of query, key and value: "float32", "bfloat16" or "float16".
        mask: the mask; its JAX arrays are traced, its NumPy arrays known when tracing. None: queries see all keys.
        backward: whether the gradients of query, key and value are computed too.
        memory_limit: bytes that a contender may use; `Refused` is raised for one that needs more.
        seed: the seed of the inputs.

    Raises:
        ValueError: the shapes or the dtype are not valid for attention, or the mask does not fit the shapes.
    """

    length: int
    batch: int = 1
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: str = "float32"
    mask: Mask | None = None
    backward: bool = False
    memory_limit: int = dataclasses.field(default_factory=default_memory_limit)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.K < 1 or self.heads % self.K:
            raise ValueError(f"kv_heads={self.K} must be a divisor of heads={self.heads}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} is unknown; use float32, bfloat16 or float16")
        if self.mask is not None:
            self.mask.bind(*self.shape)

    @property
    def K(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def label(self) -> str:
        """The case in a few words."""
        return f"{self.dtype} T={self.length}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        return self.batch, self.heads, self.length, self.length

    @functools.cached_property
    def inputs(self) -> tuple[Array, Array, Array]:
        """Query [B, T, H, D], key and value [B, T, K, D]."""
        rng = np.random.default_rng(self.seed)
        q, k, v = (self._draw(rng, heads) for heads in (self.heads, self.K, self.K))
        return q, k, v

    @functools.cached_property
    def d_out(self) -> Array:
        """The output's cotangent, [B, T, H, D]."""
        return self._draw(np.random.default_rng(self.seed + 1), self.heads)

    def _draw(self, rng: np.random.Generator, heads: int) -> Array:
        drawn = rng.standard_normal((self.batch, self.length, heads, self.head_dim), np.float32)
        return drawn.astype(jnp.dtype(self.dtype))

    @functools.cached_property
    def device_inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`inputs` on JAX's default device, shared by all contenders."""
        q, k, v = map(jnp.asarray, self.inputs)
        return q, k, v

    @functools.cached_property
    def truth(self) -> Truth:
        """The oracle's results."""
        from attnops_testing.bench.truth import Truth

        return Truth(self)

    @property
    def traced_mask(self) -> bool:
        """Whether the mask holds JAX arrays, which reach a compiled program as arguments."""
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(self.mask))

    def rows_seen(self, rows: Array, batches: Array, heads: Array) -> Array:
        """The mask for some queries, booleans that broadcast to [batches, heads, rows, S]."""
        if self.mask is None:
            return np.ones((1, 1, 1, 1), bool)
        indices = (batches, heads, rows, np.arange(self.length))
        shaped = (x.reshape([-1 if axis == i else 1 for axis in range(4)]) for i, x in enumerate(indices))
        return np.asarray(self.mask.bind(*self.shape).allowed(*shaped))

    def dense(self, mask: Mask | None) -> jax.Array | None:
        """A mask as a boolean array that broadcasts to [B, H, T, S], for contenders that accept only arrays.

        Raises:
            Refused: the array needs more than the memory limit.
        """
        if mask is None:
            return None
        needed = jax.eval_shape(lambda: mask.dense(*self.shape)).size
        self.check_memory(needed, "a mask as an array of T × S")
        return mask.dense(*self.shape)

    def to_json(self) -> dict[str, object]:
        """The case's fields, for a program to read."""
        shown = ("batch", "length", "heads", "head_dim", "dtype", "backward")
        mask = "" if self.mask is None else repr(self.mask)
        return {name: getattr(self, name) for name in shown} | {"kv_heads": self.K, "mask": mask}

    def check_memory(self, needed: int, what: str) -> None:
        """Raise `Refused` if more memory is needed than the limit."""
        if needed > self.memory_limit:
            raise Refused(f"{what} needs {needed / 1e9:.1f} GB, more than the limit of {self.memory_limit / 1e9:.1f}")


def packed_documents(count: int, length: int, seed: int = 0) -> Segments:
    """Documents of random lengths that fill a sequence, as segments whose ids are traced.

    Raises:
        ValueError: there are more documents than tokens.
    """
    if not 1 <= count <= length:
        raise ValueError(f"documents={count} must be at least 1 and at most length={length}")
    borders = np.sort(np.random.default_rng(seed).choice(np.arange(1, length), count - 1, replace=False))
    return Segments(jnp.asarray(np.searchsorted(borders, np.arange(length), side="right")[None], jnp.int32))
