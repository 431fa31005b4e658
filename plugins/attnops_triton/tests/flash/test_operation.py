"""What is around the kernels: export, versions, tiles, refusals."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import (
    OperationMetadata,
    OperationRegistry,
    UnsupportedError,
    UnsupportedWarning,
    explain,
)
from attnops.biases import ScoreFn
from attnops.masks import Causal, Segments, SlidingWindow
from attnops_testing import attention
from attnops_testing.invariance import Sizes, changed_by_batch
from attnops_triton import versions
from attnops_triton.flash.plan import head_dim_chunks
from attnops_triton.flash.tile_sizes import TABLE, choose
from attnops_triton.targets import SHARED_MEMORY, known, target

NAME = "attnops-triton:flash"


def make(**fields: object) -> object:
    return OperationRegistry.create(NAME, OperationMetadata(platform="cuda", on_unsupported="error", **fields))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.tier(every=2)
def test_exported_from_a_host_without_a_gpu(arch: str) -> None:
    operation = make(block_q=32, block_k=32)  # compiled sooner than larger tiles
    x = jax.ShapeDtypeStruct((2, 300, 4, 16), jnp.bfloat16)

    def loss(*qkv: jax.Array) -> jax.Array:
        return operation(*qkv, mask=Causal()).attention_outputs.astype(jnp.float32).sum()

    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name)
                 for name in ("triton_kernel_call", "triton_kernel_call_ffi")]  # fmt: skip
    with target(arch):
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        exported = jax.export.export(program, platforms=["cuda"], disabled_checks=unchecked)(x, x, x)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.mlir_module().count("custom_call @triton_kernel_call") == 3


@pytest.mark.slow
def test_importing_imports_no_triton() -> None:
    code = "import attnops_triton, sys; sys.exit(bool({'triton', 'jax_triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("installed", "messages"),
    [
        ({"jax": "0.10.2"}, ["triton=not installed"]),
        ({"jax": "0.10.2", "triton": "3.5.1"}, ["must be at least 3.6"]),
        ({"jax": "0.11.2", "triton": "3.10.0"}, ["below 3.10"]),
        ({"jax": "0.9.2", "triton": "3.9.0"}, ["jax=0.9.2: must be at least 0.10"]),
        ({"jax": "0.13.0", "triton": "3.9.0"}, ["below 0.13"]),
        ({"jax": "0.10.2", "triton": "3.6.0"}, []),
        ({"jax": "0.12.0.1", "triton": "3.9.0"}, []),
    ],
)
def test_versions_that_do_not_work_are_reasons_with_what_to_install(
    installed: dict[str, str], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version_of", installed.get)
    reasons = [str(reason) for reason in versions.missing(interpret=False)]
    assert len(reasons) == len(messages)
    for reason, message in zip(reasons, messages, strict=True):
        assert message in reason
        assert "pip install" in reason


@pytest.mark.slow
def test_without_triton_it_serves_natively_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version_of", {"jax": "0.10.2"}.get)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 33, 2, 16)), jnp.float32)
    operation = OperationRegistry.create(NAME, OperationMetadata(platform="cuda"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = operation(x, x, x, mask=Causal()).attention_outputs
    assert [w.category for w in caught] == [UnsupportedWarning]
    assert "pip install" in str(caught[0].message)
    expected = OperationRegistry.create("vanilla")(x, x, x, mask=Causal()).attention_outputs
    np.testing.assert_allclose(found, expected, atol=2e-6)
    with pytest.raises(UnsupportedError, match=r"triton=not installed.*pip install"):
        make()(x, x, x)


@pytest.mark.parametrize(
    ("mask", "options", "chosen"),
    [
        (None, {}, "attnops:sdpa"),
        (Causal(), {}, "attnops:sdpa"),
        (Causal(), {"logits_soft_cap": 30.0}, NAME),
        (Causal() & SlidingWindow(63, 0), {}, NAME),
        (Causal() & Segments(np.arange(256) // 100), {}, NAME),
    ],
)
def test_auto_leaves_plain_attention_to_cudnn(mask: object, options: dict[str, object], chosen: str) -> None:
    x = jnp.ones((1, 256, 4, 64), jnp.bfloat16)
    auto = OperationRegistry.create("auto", OperationMetadata(platform="cuda"))
    assert explain(auto.request(x, x, x, mask=mask, **options)).chosen.name == chosen


def test_the_table_has_every_architecture_and_knows_relatives() -> None:
    assert {known(arch) for arch in SHARED_MEMORY} == set(TABLE) <= set(SHARED_MEMORY)
    assert all(SHARED_MEMORY[known(arch)] <= SHARED_MEMORY[arch] for arch in SHARED_MEMORY)
    assert [known(arch) for arch in ("sm_87", "sm_89", "sm_90", "sm_103", "sm_120", "gfx950", "")] == [
        "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "sm_90"
    ]  # fmt: skip
    *_, by_score = choose("sm_90", "bfloat16", 128, 64, 32)
    assert by_score.bq == by_score.bk, "diagonals are of square tiles"


@pytest.mark.parametrize(
    ("dim", "chunks"),
    [(8, [(0, 16)]), (64, [(0, 64)]), (80, [(0, 64), (64, 16)]), (96, [(0, 64), (64, 32)]), (100, [(0, 128)]),
     (192, [(0, 128), (128, 64)]), (576, [(0, 512), (512, 64)])],
)  # fmt: skip
def test_head_dims_are_split_in_chunks_of_powers_of_two(dim: int, chunks: list[tuple[int, int]]) -> None:
    assert head_dim_chunks(dim) == chunks


def test_blocks_that_are_no_power_of_two() -> None:
    x = jnp.ones((1, 64, 1, 16))
    with pytest.raises(UnsupportedError, match=r"block_q=48: must be a power of two"):
        make(block_q=48, interpret=True)(x, x, x)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": ScoreFn(lambda s, b, h, q, kv, table: s + table[q - kv], (jnp.ones(128),))},
    ],
)
def test_a_lookup_by_query_and_key_is_refused(options: dict[str, object]) -> None:
    x = jnp.ones((1, 64, 1, 16))
    with pytest.raises(UnsupportedError, match=r"(gather|dynamic_slice).*can't compute it for each score"):
        make(interpret=True)(x, x, x, **options)


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
def test_small_cotangents_in_float16() -> None:
    """Gradients of single scores lie below what float16 holds."""
    rng = np.random.default_rng(0)
    q, k, v, d = (jnp.asarray(rng.normal(size=(1, 256, 1, 32)) * size, jnp.float16) for size in (1, 1, 1, 1e-4))

    def gradients(name: str, platform: str, *given: Any) -> Any:
        metadata = OperationMetadata(platform=platform, interpret=platform == "cuda", on_unsupported="error")
        operation: Any = OperationRegistry.create(name, metadata)
        return jax.vjp(lambda *qkv: operation(*qkv).attention_outputs, *given[:3])[1](given[3])

    wide = [x.astype(jnp.float32) for x in (q, k, v, d)]
    expected = gradients("attnops:vanilla", "cpu", *wide)
    rounded = gradients("attnops:vanilla", "cpu", q, k, v, d)
    found = gradients("attnops-triton:flash", "cuda", q, k, v, d)
    for exact, other, own in zip(expected, rounded, found, strict=True):
        assert abs(own - exact).max() <= 2 * abs(other - exact).max()


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
@pytest.mark.tier(quick=["shape0"])
def test_on_a_mesh_that_types_name(shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh(
        shape, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: math.prod(shape)]
    )
    operation = OperationRegistry.create(
        NAME, OperationMetadata(platform="cuda", interpret=True, mesh=mesh, on_unsupported="error")
    )
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(2, 8, heads, 8)).astype(np.float32) for heads in (2, 1, 1)]
    arrays = [jax.device_put(x, NamedSharding(mesh, P("dp", None, "tp" if x.shape[2] > 1 else None))) for x in qkv]
    out = jax.jit(lambda *qkv: operation(*qkv, mask=Causal()).attention_outputs)(*arrays)
    expected = attention(*qkv, mask=np.tril(np.ones((1, 1, 8, 8), bool))).out
    np.testing.assert_allclose(out, expected, atol=5e-6)
    assert jax.typeof(out).sharding.spec[:3] == ("dp", None, "tp")


@pytest.mark.slow
def test_a_row_is_the_same_in_any_batch() -> None:
    """The gradients of query and key depend on a row sum by XLA as well."""
    operation = make(interpret=True, mode="train")
    changed = changed_by_batch(operation, Sizes(40, 40, 2, 1, 16), "float32", (2,))
    assert changed <= {"query", "key"}
