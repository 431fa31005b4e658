"""Random prompts and mixed batches whose scores are transposed in several units, held to the core's `flash`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops.masks import Causal, Chunked, KeyPadding, Lengths, Mask, MaskFn, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache, in_place_reasons, sharded
from attnops_tpu.caches import transposed
from attnops_tpu.generations import target

B, K, H, SLOTS, PAGE = 4, 2, 4, 96, 16
METADATA = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)
CODECS = (None, None, "int8 token_head", "int8 head", "float8_e4m3fn tensor", "float8_e5m2 head", "int4 token_head")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()  # its keys lack these sizes
    monkeypatch.setattr(transposed, "SUB_ROWS", 16)
    monkeypatch.setattr(transposed, "SUB_KEYS", 16)


@dataclasses.dataclass
class Call:
    """A random call; the same seed gives the same."""

    seed: int

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.storage = self.pick("paged", "paged", "paged", "dense", "ring")
        codec = self.pick(*CODECS)
        self.codec = None if codec is None else Quantized(*codec.split())
        self.D = 128 if codec and "int4" in codec else int(self.pick(16, 8))
        self.dtype = self.pick(jnp.float32, jnp.bfloat16)
        self.is_packed, self.layers = bool(self.random.integers(2)), self.pick(None, 3)
        self.T = int(self.random.integers(9, 60))
        self.is_mapped = not self.is_packed and self.pick(False, True)

    def pick(self, *given: Any) -> Any:
        return given[self.random.integers(len(given))]

    def normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.normal(size=shape), self.dtype)

    def cache(self) -> Cache:
        sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": self.D, "dtype": self.dtype,
                                 "codec": self.codec}  # fmt: skip
        sizes |= {} if self.layers is None else {"layers": self.layers}
        if self.codec is not None and self.codec.scales != "token_head":
            shape = () if self.codec.scales == "tensor" else (K,)
            sizes |= {name: jnp.full(shape, 0.05) for name in ("key_scale", "value_scale")}
        if self.storage == "ring":
            return WindowCache.create(window=34, max_append=SLOTS - 33, **sizes)
        if self.storage == "dense":
            return DenseCache.create(length=SLOTS, starts=self.pick(None, [3, 0, 40, 0]), **sizes)
        # The pages of row 1 end before its tokens, and row 2 has none.
        table = self.random.permutation(B * SLOTS // PAGE).reshape(B, -1)
        table[1, 3:], table[2] = -1, self.pick(-1, table[2])
        return PagedCache.create(pages=table.size, page_size=PAGE, max_pages=table.shape[1], table=table,
                                 width=self.pick(None, 2 * self.D), **sizes)  # fmt: skip

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        window = self.random.integers(1, 40, (B, 1))
        masks: list[Mask] = [
            Causal(), Causal() & SlidingWindow(int(window[0, 0]), 0), Causal() & SlidingWindow(jnp.asarray(window), 0),
            Causal() & Chunked(24), Causal() & Lengths(self.random.integers(0, SLOTS, B)),
            MaskFn(lambda b, h, q, kv: (kv <= q) & ((kv + h) % 5 != 1)), Causal() | MaskFn(lambda b, h, q, kv: kv < 9),
        ]  # fmt: skip
        if self.storage != "ring":
            masks.append(Causal() & KeyPadding(self.random.random((B, SLOTS)) < 0.6))
        options: dict[str, Any] = {"mask": self.pick(*masks), "return_lse": True}
        options |= self.pick({}, {"bias": ALiBi(jnp.asarray(self.random.random(H), jnp.float32))})
        options |= self.pick({}, {"sinks": self.normal(H).astype(jnp.float32)}, {"logits_soft_cap": 1.5})
        return options

    @functools.cached_property
    def rows(self) -> Rows | None:
        """Runs of 1 or many tokens, some of none; there may be padding before, between and after them."""
        if not self.is_packed:
            return None
        size = np.minimum(self.pick([1, 1, 1, 40], [17, 1, 0, 30], [0, 50, 1, 1], [13, 12, 9, 20]), self.T // 2)
        starts = int(self.random.integers(3)) + np.concatenate([[0], np.cumsum(size)])
        return Rows(jnp.asarray(starts, jnp.int32), jnp.asarray(self.random.permutation(B), jnp.int32))

    def run(self) -> None:
        cache, batch = self.cache(), (1 if self.is_packed else B)
        rows, options = self.rows, self.options
        n = self.T if rows is None else max(self.T, int(rows.starts[-1]) + 2)
        before = [self.normal(B, 40, K, self.D) for _ in range(2)]
        held = jnp.asarray(self.random.integers(0, 40, B))
        mapped = 2 if self.is_mapped else 1
        query, key, value = (self.normal(mapped, batch, n, heads, self.D) for heads in (H, K, K))
        lengths = self.pick(None, jnp.asarray(self.random.integers(0, n + 1, B)))
        if self.is_packed:
            lengths = None

        def step(operation: Any) -> Any:
            def one(query: Any, key: Any, value: Any, cache: Any, at: Any) -> Any:
                if self.layers is None:
                    cache = cache.append(*before, held)
                    return operation.step(query, key, value, cache, rows=rows, query_lengths=lengths, **options)
                cache = cache.pending(40, held).layer(at).write(*before).cache
                pending = cache.pending(n, lengths, rows).layer(at)
                output, pending = operation.step(query, key, value, pending, **options)
                return output, pending.cache

            program = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, None)))
            return program(query, key, value, cache, jnp.int32(1))

        kernel = OperationRegistry.create("attnops-tpu:flash", METADATA)
        plain = cache if self.layers is None else cache.layer(1)
        given = {"rows": rows, "query_lengths": lengths, **options}
        reasons = in_place_reasons(kernel, "tpu", kernel.request(query[0], plain, **given))
        assert not reasons, reasons
        expected, after = step(OperationRegistry.create("flash", OperationMetadata(platform="cpu")))
        with target(self.pick("v4", "v6e", "tpu7x")):
            got, written = step(kernel)
        for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(x, y)
        rounding = 2**-6 if self.dtype == jnp.bfloat16 else 2e-5
        for name in ("attention_outputs", "logsumexp"):
            a, b = (np.asarray(getattr(x, name), np.float32) for x in (got, expected))
            np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.tier(every=8)
def test_random_steps_are_right(seed: int) -> None:
    Call(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize(("axes", "is_packed"), [(("dp", "tp"), False), (("tp",), True), (("dp",), True)])
@pytest.mark.tier(every=3)
def test_many_queries_on_a_mesh_of_explicit_axes_are_right(
    axes: tuple[str, ...], is_packed: bool, is_paged: bool
) -> None:
    """Packed rows whose rows are on several devices are appended first; each device attends to its rows."""
    mesh = jax.make_mesh((2,) * len(axes), axes, (jax.sharding.AxisType.Explicit,) * len(axes),
                         devices=jax.devices()[: 2 ** len(axes)])  # fmt: skip

    random = np.random.default_rng(0)
    table = random.permutation(B * SLOTS // PAGE).reshape(B, -1)
    if is_paged and "dp" in axes:  # the pages of a device are those of its rows
        table = np.concatenate([random.permutation(B * SLOTS // PAGE // 2).reshape(B // 2, -1) for _ in range(2)])

    def make(first: int = 0) -> Cache:
        sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": 16, "dtype": jnp.float32}
        if not is_paged:
            return DenseCache.create(length=SLOTS, **sizes)
        pages = table + first * (np.arange(B) >= B // 2)[:, None]
        return PagedCache.create(pages=table.size, page_size=PAGE, max_pages=table.shape[1], table=pages, **sizes)

    before, new, query = (jnp.asarray(random.normal(size=(B, 40, n, 16)), jnp.float32) for n in (K, K, H))
    rows = Rows(jnp.array([0, 1, 36, 37]), jnp.array([2, 3, 0])) if is_packed else None
    given = [x[:1] if is_packed else x for x in (query, new, -new)]

    def step(operation: Any, cache: Cache) -> Any:
        program = jax.jit(functools.partial(operation.step, mask=Causal(), return_lse=True), donate_argnums=3)
        return program(*given, cache, rows=rows)

    kernel = OperationRegistry.create("attnops-tpu:flash", METADATA)
    native = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    held = np.array([40, 7, 0, 33])
    with jax.set_mesh(mesh), target("v6e"):
        got, written = jax.block_until_ready(step(kernel, sharded(make, mesh).append(before, -before, held)))
    expected, after = step(native, make(table.size // 2 if "dp" in axes else 0).append(before, -before, held))
    for name in ("attention_outputs", "logsumexp"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=2e-5, atol=2e-5)
    for x, y in zip(written.read(), after.read(), strict=True):
        np.testing.assert_array_equal(x, y)
