"""Functions of masks and biases: what they close over is read anew by every call, and nothing keeps it."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, Bias, RelativePosition, ScoreFn
from attnops.masks import Causal, MaskFn
from attnops.sharding import create_mesh
from attnops_testing.oracle import attention, attention_gradients
from attnops_testing.tolerance import assert_close, tolerance

B, T, H, D = 1, 12, 2, 8
I, J = np.ogrid[:T, :T]
# Interpreted kernels for TPUs take seconds; a bound method on one is for every run.
# Triton is for Linux alone.
TRITON = ("triton",) if importlib.util.find_spec("attnops_triton") else ()
BACKENDS = ("flash", "auto", "vanilla", pytest.param("tpu", marks=pytest.mark.slow), *TRITON)
KINDS = ("mask", "bias")


def make(backend: str, **metadata: Any) -> Callable[..., Any]:
    """An operation of the core, or a plugin's interpreted kernel."""
    if backend not in ("tpu", "triton"):
        return OperationRegistry.create(f"attnops:{backend}", OperationMetadata(**metadata))
    platform = {"tpu": "tpu", "triton": "cuda"}[backend]
    metadata = {"platform": platform, "interpret": True, "on_unsupported": "error"} | metadata
    return OperationRegistry.create(f"attnops-{backend}:flash", OperationMetadata(**metadata))


def operands() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(3)]


def check(out: Any, **options: Any) -> None:
    """Hold an output to the oracle, by the tolerance rule."""
    exact = attention(*operands(), **options)
    plain = attention(*operands(), dtype=np.float32, **options)
    assert_close("output", out, exact.out, tolerance(exact.out, plain.out, exact.out_magnitude, np.float32, 2))


class Layer:
    """A layer whose methods are a mask and a bias; what it holds may change, and may be traced."""

    def __init__(self, width: Any) -> None:
        self.width = width

    def seen(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return jnp.abs(q - kv) <= self.width

    def score(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - self.width * jnp.abs(q - kv).astype(s.dtype)

    def options(self, kind: str) -> dict[str, Any]:
        return {"mask": MaskFn(self.seen)} if kind == "mask" else {"bias": ScoreFn(self.score)}


def dense(kind: str, width: Any) -> dict[str, np.ndarray]:
    """What `Layer.options` should mean, to the oracle."""
    distance = np.broadcast_to(np.abs(I - J), (B, H, T, T))
    return {"mask": distance <= width} if kind == "mask" else {"bias": -np.float64(width) * distance}


class TestWhatIsClosedOver:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("backend", ["flash", "auto", "vanilla", "tpu", *TRITON])
    @pytest.mark.tier(quick=["auto-mask", "auto-bias", "vanilla-bias"])
    def test_a_fresh_jit_sees_what_a_bound_method_holds_by_then(self, backend: str, kind: str) -> None:
        layer, operation = Layer(1), make(backend)
        for width in (1, 5):
            layer.width = width
            out = jax.jit(lambda q, k, v: operation(q, k, v, **layer.options(kind)).attention_outputs)(*operands())
            check(out, **dense(kind, width))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.tier(quick=["auto-mask", "auto-bias"])
    def test_a_fresh_jit_sees_a_table_that_was_changed_in_place(self, backend: str, kind: str) -> None:
        table, operation = np.zeros(T, np.float32), make(backend)

        def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (jnp.asarray(table.copy())[kv] == 0) | (q == kv)

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + jnp.asarray(table.copy())[kv]

        options: dict[str, Any] = {"mask": MaskFn(seen)} if kind == "mask" else {"bias": ScoreFn(score)}
        for change in (0, 1):
            table[3:7] = change
            out = jax.jit(lambda q, k, v: operation(q, k, v, **options).attention_outputs)(*operands())
            exact = (table == 0) | (I == J) if kind == "mask" else table
            check(out, **{kind: np.broadcast_to(exact, (B, H, T, T))})

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.slow
    def test_traced_attributes_work_in_every_trace_and_eager(self, backend: str, kind: str) -> None:
        layer, operation = Layer(1), make(backend)

        def run(width: Any, *qkv: Any) -> Any:
            layer.width = width
            return operation(*qkv, **layer.options(kind)).attention_outputs

        for width in (2, 4):
            check(jax.jit(lambda *x: run(*x))(width, *operands()), **dense(kind, width))
        check(run(3, *operands()), **dense(kind, 3))

    @pytest.mark.parametrize("backend", ["flash", "vanilla"])
    @pytest.mark.slow
    def test_a_mapped_attribute_belongs_to_its_slice(self, backend: str) -> None:
        operation = make(backend)

        def run(width: Any, *qkv: Any) -> Any:
            return operation(*qkv, **Layer(width).options("mask")).attention_outputs

        outs = jax.vmap(run, in_axes=(0, None, None, None))(jnp.array([2, 4]), *operands())
        for out, width in zip(outs, (2, 4), strict=True):
            check(out, **dense("mask", width))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.tier(quick=["auto", "vanilla"])
    def test_a_traced_float_that_a_bias_closes_over_has_a_gradient(self, backend: str) -> None:
        operation = make(backend)
        d_out = operands()[1]

        @jax.jit
        @jax.grad
        def gradient(width: Any) -> Any:
            out = operation(*operands(), bias=ScoreFn(Layer(width).score), mode="train").attention_outputs
            return (out * d_out).sum()

        bias = dense("bias", 0.25)["bias"]
        exact, plain = (
            attention_gradients(*operands(), d_out=d_out, bias=bias, dtype=dtype) for dtype in (np.float64, np.float32)
        )
        total, rounded = (-(x.values["bias"] * np.abs(I - J)).sum() for x in (exact, plain))
        magnitude = (exact.magnitudes["bias"] * np.abs(I - J)).sum()
        allowed = tolerance(np.asarray(total), np.asarray(rounded), magnitude, np.float32, 3)
        assert_close("the gradient", gradient(0.25), np.asarray(total), allowed)


class TestUnderAMesh:
    @pytest.mark.parametrize("staged", [False, True])
    def test_what_is_closed_over_and_control_flow(self, staged: bool) -> None:
        mesh = create_mesh((2,), ("tp",), devices=jax.devices()[:2])
        operation = make("flash", mesh=mesh)

        def run(width: Any, *qkv: Any) -> Any:
            def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
                raised = jax.lax.fori_loop(0, 3, lambda _, x: x + width, s)
                return jax.lax.cond(q > kv + h, lambda: raised, lambda: s - jax.nn.relu(width))

            return operation(*qkv, bias=ScoreFn(score)).attention_outputs

        exact = np.where(np.arange(H)[:, None, None] + J < I, 1.5, -0.5)
        check((jax.jit(run) if staged else run)(jnp.float32(0.5), *operands()), bias=exact)

    def test_what_varies_in_a_shard_map_of_ones_own(self) -> None:
        mesh = create_mesh((2,), ("tp",), devices=jax.devices()[:2])
        operation = make("flash")

        def part(width: Any, *qkv: Any) -> Any:
            layer = Layer(width[0])
            return operation(*qkv, **layer.options("mask"), **layer.options("bias")).attention_outputs

        heads = PartitionSpec(None, None, "tp")
        sharded = jax.shard_map(part, mesh=mesh, in_specs=(PartitionSpec("tp"), *(heads,) * 3), out_specs=heads)
        widths = np.array([2.0, 4.0], np.float32)
        distance = np.abs(I - J)
        exact = {"mask": distance <= widths[:, None, None], "bias": -widths[:, None, None] * distance}
        check(jax.jit(sharded)(widths, *operands()), **exact)


class TestArguments:
    @pytest.mark.parametrize("staged", [False, True])
    @pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
    @pytest.mark.tier(slow=["vanilla-False", "sdpa-False", "triton-False"])
    def test_numpy_arrays_are_looked_up_in_and_indices_out_of_range_are_clamped(
        self, backend: str, staged: bool
    ) -> None:
        few = np.arange(4) % 2 == 0  # of the first four tokens; the mask hides the rest

        def seen(b: Any, h: Any, q: Any, kv: Any, few: Any) -> Any:
            return few[kv] & (kv < 4) | (kv == q)

        operation = make(backend)

        def run(*qkv: Any) -> Any:
            return operation(*qkv, mask=MaskFn(seen, (few,)), mode="prefill").attention_outputs

        exact = few[np.minimum(J, 3)] & (J < 4) | (I == J)
        check((jax.jit(run) if staged else run)(*operands()), mask=np.broadcast_to(exact, (B, H, T, T)))

    @pytest.mark.parametrize("staged", [False, True])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_numpy_arrays_of_a_bias(self, backend: str, staged: bool) -> None:
        few = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
        bias = ScoreFn(lambda s, b, h, q, kv, few: s + jnp.where(kv < 4, few[kv], 0), (few,))
        operation = make(backend)

        def run(*qkv: Any) -> Any:
            return operation(*qkv, bias=bias).attention_outputs

        exact = np.where(J < 4, few[np.minimum(J, 3)], 0)
        check((jax.jit(run) if staged else run)(*operands()), bias=np.broadcast_to(exact, (B, H, T, T)))

    @pytest.mark.parametrize("backend", ["flash", *TRITON])
    def test_numpy_arrays_of_a_mask_that_triton_has_as_bits(self, backend: str) -> None:
        table = np.random.default_rng(0).random(97) < 0.5
        mask = MaskFn(lambda b, h, q, kv, table: table[(q * 31 + kv * 17) % 97] | (q == kv), (table,))
        out = jax.jit(lambda *x: make(backend)(*x, mask=mask).attention_outputs)(*operands())
        exact = table[(I * 31 + J * 17) % 97] | (I == J)
        check(out, mask=np.broadcast_to(exact, (B, H, T, T)))

    def test_integers_that_their_dtype_in_jax_does_not_hold_are_refused(self) -> None:
        mask = MaskFn(lambda b, h, q, kv, x: x[q] == x[kv], (np.array([0, 1 << 40]),))
        with pytest.raises(ValueError, match=r"MaskFn.*integers from 0 to 1099511627776, but must fit int32"):
            make("flash")(*operands(), mask=mask)


class TestOffsets:
    @pytest.mark.parametrize("kind", ["ALiBi", "RelativePosition"])
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.tier(quick=["vanilla-ALiBi", "vanilla-RelativePosition", "triton-ALiBi"])
    def test_the_offset_of_a_bias_may_be_traced(self, backend: str, kind: str) -> None:
        operation = make(backend)
        slopes, table = np.array([0.5, 0.25], np.float32), np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, H)

        def bias(offset: Any) -> Bias:
            if kind == "ALiBi":
                return ALiBi(slopes, offset=offset)
            return RelativePosition(table, max_distance=9, offset=offset)

        @jax.jit
        def run(offset: Any, *qkv: Any) -> Any:
            return operation(*qkv, bias=bias(offset), mask=Causal(offset=0)).attention_outputs

        for offset in (0, 3):
            exact = np.asarray(bias(offset).apply(jnp.zeros((1, H, T, T)), 0, np.arange(H)[:, None, None], I, J))
            if kind == "ALiBi":
                exact = -slopes[:, None, None] * np.abs(J - I - offset)[None, None]
            check(run(offset, *operands()), bias=exact, mask=(J <= I)[None, None])

    def test_an_offset_for_each_batch_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"ALiBi's offset=.* must be an int, or an integer array of shape \[\]"):
            make("flash")(*operands(), bias=ALiBi(np.ones(H, np.float32), offset=np.zeros((B, 1), np.int32)))


def functions_over(table: Any) -> list[dict[str, Any]]:
    return [
        {"mask": MaskFn(lambda b, h, q, kv: table[kv % 4] < 2)},
        {"mask": Causal() & MaskFn(lambda b, h, q, kv: table[q] < 2), "bias": ScoreFn(
            lambda s, b, h, q, kv: s + jax.nn.relu(table[kv]))},
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "backend", ["flash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vanilla", "auto"))]
)
@pytest.mark.tier(every=4)
def test_nothing_keeps_what_a_function_closed_over(backend: str, staged: bool) -> None:
    operation, x = make(backend), jnp.ones((1, 4, 1, 4))
    alive = []
    for i in range(5):
        for table in (jnp.full((1 << 12,), i / 8), np.full((1 << 12,), i / 8, np.float32)):
            alive.append(weakref.ref(table))
            for options in functions_over(jnp.asarray(table) if isinstance(table, np.ndarray) else table):
                run = lambda x, options=options: operation(x, x, x, **options).attention_outputs  # noqa: E731
                jax.block_until_ready((jax.jit(run) if staged else run)(x))
        del table, options, run
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * len(alive)


def resident_memory() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.tier(every=2)
def test_eager_calls_over_fresh_tables_keep_neither_tables_nor_memory(kept: bool) -> None:
    """800 MB of tables; with ``kept`` the test itself keeps them, which the measurement must show."""
    operation, x, size = make("flash"), jnp.ones((1, 4, 1, 4)), 1 << 22

    def call(i: int) -> jax.Array:
        table = jnp.full((size // 4,), i / 8)
        out = operation(x, x, x, **functions_over(table)[i % 2]).attention_outputs
        jax.block_until_ready(out)
        return table

    for i in range(2):
        call(i)
    gc.collect()
    measured = sys.platform == "linux"
    before, alive, tables = resident_memory() if measured else 0, [], []
    for i in range(200):
        table = call(i)
        alive.append(weakref.ref(table))
        tables += [table] * kept
        del table
    gc.collect()
    assert [ref() is None for ref in alive] == [not kept] * 200
    if measured:
        grown = resident_memory() - before
        assert grown > 700e6 if kept else grown < 100e6, f"{grown / 1e6:.0f} MB"


@pytest.mark.parametrize("backend", ["flash", "vanilla"])
@pytest.mark.slow
def test_nothing_keeps_what_a_function_of_whole_arrays_closed_over(backend: str) -> None:
    operation, x = make(backend), jnp.ones((1, 4, 1, 4))
    alive = []
    for i in range(3):
        table = jnp.full((1 << 12,), i)
        alive.append(weakref.ref(table))
        mask = MaskFn(lambda b, h, q, kv, table=table: jnp.concatenate([q, q], -1)[..., :1] + table[0] >= kv)
        operation(x, x, x, mask=mask).attention_outputs.block_until_ready()
        del table, mask
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * 3


class TestWhatHasNoProgram:
    """Functions that work on whole arrays alone, or can't be evaluated again, are called as they are."""

    @pytest.mark.parametrize("staged", [False, True])
    @pytest.mark.parametrize("backend", ["flash", "vanilla", *TRITON])
    @pytest.mark.tier(quick=["vanilla-False", "vanilla-True", "triton-True"])
    def test_a_mask_of_whole_arrays(self, backend: str, staged: bool) -> None:
        operation, width = make(backend), [1]

        def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return jnp.concatenate([q, q], axis=-1)[..., :1] - kv <= jnp.asarray(width[0])

        for width[0] in (3, 1):
            run = lambda *x: operation(*x, mask=MaskFn(seen)).attention_outputs  # noqa: E731
            check((jax.jit(run) if staged else run)(*operands()), mask=(width[0] >= I - J)[None, None])

    @pytest.mark.slow
    def test_a_derivative_that_closes_over_an_index(self) -> None:
        """Where the function itself is differentiated, the index is at hand."""

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            @jax.custom_jvp
            def same(x: Any) -> Any:
                return x

            same.defjvp(lambda x, d: (x[0], jnp.where(q > 5, d[0], 0.0)))
            return same(s)

        q, k, v = operands()
        run = lambda q: make("flash")(q, k, v, bias=ScoreFn(score)).attention_outputs  # noqa: E731
        (d_q,) = jax.vjp(run, q)[1](jnp.asarray(v))
        exact = attention_gradients(q, k, v, d_out=v).values["query"]
        assert np.abs(d_q[:, :6]).max() == 0
        np.testing.assert_allclose(d_q[:, 6:], exact[:, 6:], atol=2e-6)

    @pytest.mark.slow
    def test_a_sum_over_scores_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"but must give float32 of the scores' shape"):
            make("flash")(*operands(), bias=ScoreFn(lambda s, b, h, q, kv: s.sum()))
