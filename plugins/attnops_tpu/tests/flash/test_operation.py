"""What is around the kernels: export, generations, tiles, refusals."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.biases import ScoreFn
from attnops.masks import Causal, MaskFn, Segments
from attnops_testing import attention, attention_gradients
from attnops_testing.features import combine
from attnops_testing.invariance import Sizes, changed_by_batch
from attnops_tpu import generations
from attnops_tpu.aot import compile_for
from attnops_tpu.flash.tile_sizes import MAX_TILES, TABLE, Problem, SubTileSizes, Work, choose
from attnops_tpu.generations import GENERATIONS, UNKNOWN, generation, target

NAME = "attnops-tpu:flash"


def make(**fields: object) -> object:
    return OperationRegistry.create(NAME, OperationMetadata(platform="tpu", on_unsupported="error", **fields))


@pytest.mark.slow
def test_exported_from_a_host_without_a_tpu() -> None:
    operation = make()
    x = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)

    def loss(*qkv: jax.Array) -> jax.Array:
        return operation(*qkv, mask=Causal()).attention_outputs.astype(jnp.float32).sum()

    exported = jax.export.export(jax.jit(jax.value_and_grad(loss, (0, 1, 2))), platforms=["tpu"])(x, x, x)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("tpu",)
    module = again.mlir_module()
    assert "attnops_flash_forward" in module
    assert "attnops_flash_backward" in module


REFUSED = "\"tpu\" was asked for, but the devices are 'cpu': .* leave platform out"


def test_a_program_for_a_host_without_a_tpu_is_refused_with_what_to_do() -> None:
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
    traced = jax.jit(make()).trace(x, x, x)
    assert "attnops_flash_forward" in traced.lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(NotImplementedError, match=REFUSED):
        traced.lower()


@pytest.mark.slow
def test_a_call_outside_of_jit_on_a_host_without_a_tpu_is_refused() -> None:
    x = jnp.zeros((1, 128, 1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=REFUSED):
        make()(x, x, x)


@pytest.mark.slow
def test_importing_imports_no_pallas() -> None:
    code = "import attnops_tpu, sys; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_generation_is_that_of_target_and_unknown_ones_are_refused() -> None:
    assert generation() == UNKNOWN
    with target("v6e"):
        assert generation() == GENERATIONS["v6e"]
    assert set(TABLE) == set(GENERATIONS)
    with pytest.raises(ValueError, match="'v9' is unknown"), target("v9"):
        pass


def test_a_chip_without_a_plan_has_that_of_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas import tpu as pltpu

    def on(kind: str, info: Any) -> Any:
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
        monkeypatch.setattr(pltpu, "get_tpu_info", info)
        return generation()

    def unknown() -> Any:
        raise ValueError("Unsupported TPU device kind")

    known = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)
    later = dataclasses.replace(known, generation=8, vmem_capacity_bytes=192 << 20, num_sublanes=16)
    with pytest.warns(UserWarning, match="no tile sizes for 'TPU8t' \\(192 MiB .* 16 sublanes\\).* as for tpu7x"):
        chip = on("TPU8t", lambda: later)
    assert chip == GENERATIONS["tpu7x"]._replace(vmem=192 << 20, sublanes=16)
    with pytest.warns(UserWarning, match="'TPU9' \\(JAX doesn't describe it\\).* as for v4"):
        assert on("TPU9", unknown) == UNKNOWN
    assert on("TPU v6 lite", unknown) == GENERATIONS["v6e"]


@pytest.mark.slow
@pytest.mark.parametrize("D", [32, 24])
def test_registers_of_16_sublanes(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are right; for a head dim that 16 does not divide, reductions have 8 sublanes."""
    monkeypatch.setitem(generations.GENERATIONS, "tpu7x", GENERATIONS["tpu7x"]._replace(sublanes=16))
    q, k, v, d = np.random.default_rng(0).normal(size=(4, 1, 96, 2, D)).astype(np.float32)
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_q=32, block_k=32)
    flash = OperationRegistry.create("attnops-tpu:flash", metadata)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: flash(*qkv, mask=Causal()).attention_outputs, q, k, v)
        return out, pull_back(d)

    with target("tpu7x"):
        out, result = both(q, k, v, d)
    seen = np.tri(96, dtype=bool)[None, None]
    np.testing.assert_allclose(out, attention(q, k, v, mask=seen).out, atol=5e-6)
    expected = attention_gradients(q, k, v, mask=seen, d_out=d).values
    for x, name in zip(result, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(x, expected[name], atol=2e-5)


def all_full(bq: int, bk: int, sizes: SubTileSizes) -> Work:
    """8,192 tokens without a mask."""
    tiles = -(-8192 // bq) * -(-8192 // bk)
    return Work(tiles, tiles, 1)


def test_tiles_fit_the_least_memory_and_the_mask() -> None:
    problem = Problem(T=8192, S=8192, G=1, D=128, Dv=128, itemsize=2, out_itemsize=2)
    with target("v6e"):
        large = choose(OperationMetadata(), problem, all_full)
        # Small tiles compute fewer masked scores.
        small = choose(OperationMetadata(), problem, lambda bq, bk, _: Work(8192 // bq * 2, 8192 // bq * 2, 1))
        less_code = choose(OperationMetadata(), problem, lambda *sizes: all_full(*sizes)._replace(code=3))
    assert large.bq * large.bk > small.bq * small.bk
    assert large.bq * large.bk == 2 * less_code.bq * less_code.bk, "three bodies of 15,000 bundles are too many"
    wide = Problem(T=8192, S=8192, G=8, D=576, Dv=512, itemsize=4, out_itemsize=4)
    assert choose(OperationMetadata(), wide, all_full).bq < large.bq
    given = choose(OperationMetadata(block_q=128, block_k=384), problem, all_full)
    assert (given.bq, given.bk) == (128, 384)
    # Where nothing fits the table's budget, what is given stays given.
    huge = Problem(T=8192, S=8192, G=1, D=576, Dv=512, itemsize=4, out_itemsize=4, bytes_a_score=4000)
    one = choose(OperationMetadata(block_k=256), huge, all_full)
    assert (one.bq, one.bk) == (128, 256)


def test_gradients_of_long_sequences_need_one_sweep() -> None:
    """Of several, each would add its gradients of keys and values in float32."""
    problem = Problem(T=32768, S=32768, G=1, D=128, Dv=128, itemsize=2, out_itemsize=2)
    for name in ("v5p", "v6e", "tpu7x"):
        with target(name):
            one = choose(OperationMetadata(), problem, all_full)
            several = choose(OperationMetadata(), problem._replace(G=8), all_full)
        assert one.span * one.bq == 32768
        assert several.span * several.bq < 32768, "eight heads do not fit"
        assert 8 * 8 * 128 * several.span * several.bq < several.vmem


def test_tiles_can_be_numbered() -> None:
    tokens = 4 << 20
    problem = Problem(T=tokens, S=tokens, G=1, D=64, Dv=64, itemsize=2, out_itemsize=2)
    # By its count alone the smallest would be chosen.
    sizes = choose(OperationMetadata(), problem, lambda bq, bk, _: Work(bq * bk, bq * bk, 1))
    assert -(-tokens // min(sizes.bq, sizes.bk)) <= MAX_TILES
    x = jax.ShapeDtypeStruct((1, tokens, 1, 64), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"block_q=128: 4194304 tokens are more than 8192 such tiles"):
        jax.eval_shape(make(block_q=128), x, x, x)


def test_blocks_that_hardware_has_not_are_refused() -> None:
    x = jnp.ones((1, 256, 1, 64))
    with pytest.raises(UnsupportedError, match=r"block_q=100: must be a multiple of 128"):
        make(block_q=100)(x, x, x)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": MaskFn(lambda b, h, q, kv: jnp.arange(256)[(q * kv) % 256] > 3)},
        {"bias": ScoreFn(lambda s, b, h, q, kv, table: s + table[q - kv], (jnp.ones(512),))},
    ],
)
def test_a_lookup_by_query_and_key_is_refused(options: dict[str, object]) -> None:
    x = jnp.ones((1, 256, 1, 64))
    with pytest.raises(UnsupportedError, match=r"(gather|dynamic_slice).*can't compute it for each score"):
        make()(x, x, x, **options)


@pytest.mark.slow
def test_head_dims_that_fill_no_register() -> None:
    problem = dataclasses.replace(combine(["Causal", "GQA"]), D=5, Dv=3).problem(make(interpret=True).metadata)
    problem.check(OperationRegistry.create(NAME, problem.metadata))


@pytest.mark.slow
def test_derivatives_that_the_kernel_lacks_are_those_of_plain_jax() -> None:
    x = jnp.sin(jnp.arange(128.0)).reshape(1, 16, 1, 8)

    @jax.jit
    def derivatives(x: jax.Array) -> Any:
        def loss(operation: Any, y: jax.Array) -> jax.Array:
            return (operation(y, x, x, mask=Causal()).attention_outputs * jnp.cos(7 * x)).sum()

        def along(operation: Any) -> Any:
            gradient = jax.grad(functools.partial(loss, operation))
            return jax.jvp(gradient, (x,), (x,)), jax.grad(lambda y: (gradient(y) * x).sum())(x)

        return along(make(interpret=True)), along(OperationRegistry.create("vanilla"))

    found, expected = derivatives(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_on_a_mesh_that_types_name(shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh(
        shape, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: math.prod(shape)]
    )
    operation = OperationRegistry.create(
        NAME, OperationMetadata(platform="tpu", interpret=True, mesh=mesh, on_unsupported="error")
    )
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(2, 8, heads, 8)).astype(np.float32) for heads in (2, 1, 1)]
    arrays = [jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp" if x.shape[2] > 1 else None))) for x in qkv]
    out = jax.jit(lambda *qkv: operation(*qkv, mask=Causal()).attention_outputs)(*arrays)
    expected = attention(*qkv, mask=np.tril(np.ones((1, 1, 8, 8), bool))).out
    np.testing.assert_allclose(out, expected, atol=5e-6)
    assert jax.typeof(out).sharding.spec[:3] == ("dp", None, "tp")


def test_kernels_are_traced_where_x64_is_on() -> None:
    with jax.enable_x64(True):
        q = jax.ShapeDtypeStruct((1, 24, 4, 8), jnp.float32)
        k = jax.ShapeDtypeStruct((1, 24, 2, 8), jnp.float32)
        slope = jax.ShapeDtypeStruct((), jnp.float64)
        operation = make(interpret=True)

        def loss(q: jax.Array, k: jax.Array, slope: jax.Array) -> jax.Array:
            bias = ScoreFn(lambda s, b, h, q, kv, slope: s - (slope * abs(q - kv)).astype(s.dtype), (slope,))
            return operation(q, k, k, mask=Causal(), bias=bias).attention_outputs.sum()

        gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, slope)
        assert [d.dtype.name for d in gradients] == ["float32", "float32", "float64"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.tier(every=2)
def test_values_and_gradients_where_x64_is_on(dtype: jax.typing.DTypeLike) -> None:
    problem = dataclasses.replace(combine(["Causal", "GQA"]), dtype=dtype).problem(make(interpret=True).metadata)
    with jax.enable_x64(True):
        problem.check(OperationRegistry.create(NAME, problem.metadata))


@pytest.mark.slow
def test_kernels_are_compiled_where_x64_is_on() -> None:
    operation = make()

    def loss(q: jax.Array, k: jax.Array, slope: jax.Array, ids: jax.Array) -> jax.Array:
        bias = ScoreFn(lambda s, b, h, q, kv, slope: s - (slope * abs(q - kv)).astype(s.dtype), (slope,))
        out = operation(q, k, k, mask=Causal() & Segments(ids), bias=bias).attention_outputs
        return out.astype(jnp.float32).sum()

    with jax.enable_x64(True):
        q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
        slope, ids = jax.ShapeDtypeStruct((), jnp.float64), jax.ShapeDtypeStruct((1, 256), jnp.int64)
        compiled = compile_for(jax.grad(loss, (0, 1, 2)), (q, k, slope, ids), "v6e")
    assert [d.dtype.name for d in jax.tree.leaves(compiled.out_info)] == ["bfloat16", "bfloat16", "float64"]


@pytest.mark.slow
def test_a_row_is_the_same_in_any_batch() -> None:
    """The gradients of query and key depend on a row sum by XLA as well."""
    operation = make(interpret=True, mode="train")
    changed = changed_by_batch(operation, Sizes(40, 40, 2, 1, 16), "float32", (2,))
    assert changed <= {"query", "key"}
