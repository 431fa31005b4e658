"""Donated caches in programs that XLA compiles for a GPU: they are not copied."""

from __future__ import annotations

import re
from typing import Any

import cuda_compiler
import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, Quantized
from attnops_triton.targets import target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_compiler.PLUGIN.exists(), reason="`make test-all` installs XLA's compiler for CUDA"),
]
SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 1, "head_dim": 16}
OPERATION: Any = OperationRegistry.create(
    "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error", block_k=16)
)


def step(q: Any, k: Any, cache: Cache) -> Any:
    out, cache = OPERATION.step(q, k, k, cache, mask=Causal())
    return out.attention_outputs, cache


def over_layers(q: Any, k: Any, cache: Cache) -> Any:
    def block(carry: Any, layer: Any) -> Any:
        x, pending = carry
        return step(x, k, pending.layer(layer)), None

    (x, pending), _ = jax.lax.scan(block, (q, cache.pending(k.shape[1])), jnp.arange(3))
    return x, pending.cache


def over_tokens(q: Any, k: Any, cache: Cache) -> Any:
    return jax.lax.fori_loop(0, 5, lambda _, carry: step(carry[0], k, carry[1]), (q, cache))


def paged(**options: Any) -> Cache:
    return PagedCache.create(pages=8, page_size=16, max_pages=4, **SIZES, **options)


CASES = {
    "paged": (step, paged),
    "int8": (step, lambda: paged(codec=Quantized("int8"))),
    "dense": (step, lambda: DenseCache.create(length=64, **SIZES)),
    "over layers": (over_layers, lambda: paged(layers=3)),
    "over tokens": (over_tokens, paged),
}


@pytest.mark.parametrize("case", CASES)
def test_a_donated_cache_is_not_copied(case: str) -> None:
    program, create = CASES[case]
    cache = jax.eval_shape(create)
    q, k = (jax.ShapeDtypeStruct((2, 1, heads, 16), jnp.bfloat16) for heads in (2, 1))
    arrays = {x.shape for x in jax.tree.leaves(cache.store) if x.ndim > 2}

    def copies(donated: tuple[int, ...]) -> list[str]:
        with target("sm_90"):
            compiled = cuda_compiler.compiled(jax.jit(program, donate_argnums=donated), q, k, cache)
        found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", compiled.as_text())
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        assert compiled.memory_analysis().alias_size_in_bytes == (size if donated else 0)
        return [x for x in found if tuple(map(int, filter(None, x.split(",")))) in arrays]

    assert copies(donated=(2,)) == []
    assert len(copies(donated=())) == len([x for x in jax.tree.leaves(cache.store) if x.shape in arrays])
