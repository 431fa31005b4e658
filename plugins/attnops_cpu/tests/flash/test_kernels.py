"""The kernels of each instruction set, and what only they have: panels, blocks of rows, tile maps."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops.kernels import FlashCall
from attnops.masks import Band, Causal, KeyPadding, Mask, MaskFn, Segments, SlidingWindow
from attnops_cpu.flash.backend import CpuFlash
from attnops_cpu.flash.operation import FEW, FEW_GRADIENTS, IN_PLACE, PACKED_GRADIENTS
from attnops_cpu.flash.plan import EMPTY, FULL, PANEL
from attnops_cpu.flash.tile_map import tile_map
from attnops_cpu.library import library
from attnops_testing import Problem, oracle
from attnops_testing.partial import check_partial

RNG = np.random.default_rng


def draw(*shape: int, dtype: str = "float32") -> Any:
    return RNG(shape).normal(size=shape).astype(jnp.dtype(dtype))


def mask_of(name: str, B: int, T: int, S: int) -> Mask | None:
    ids = RNG(1).integers(0, 3, (B, max(T, S)))  # not in order
    return {
        "none": None,
        "causal": Causal(),
        "window": SlidingWindow(9, 3),
        "far": Band(-(10**30), 12),
        "segments": Causal() & Segments(ids[:, :T], ids[:, :S]),
        "bits": MaskFn(lambda b, h, q, kv: (q * 7 + kv * 3 + h) % 5 > 1),
        "hidden": KeyPadding(np.stack([RNG(2).random(S) < 0.05, np.zeros(S, bool)])[:B]),
        "padding": Causal() & KeyPadding(RNG(2).random((B, S)) < 0.7),
    }[name]


# Shapes (B, T, S, H, K, D, Dv) with rows, keys and features that fill no block or panel, and with several of each; the
# mask, the shape of a bias, and other options.
CASES: dict[str, tuple[tuple[int, ...], str, str, tuple[int, ...] | str | None, dict[str, Any]]] = {
    "one query": ((2, 1, 70, 4, 2, 16, 16), "float32", "none", None, {}),
    "several heads a tile": ((1, 12, 300, 6, 2, 33, 70), "float32", "causal", None, {"sinks": draw(6)}),
    "many chunks": ((1, 130, 600, 2, 1, 64, 96), "float32", "window", None, {"logits_soft_cap": 2.0}),
    "pairs of bfloat16": ((1, 29, 101, 4, 2, 37, 33), "bfloat16", "segments", None, {}),
    "bfloat16 of many tiles": ((1, 200, 210, 2, 1, 64, 64), "bfloat16", "causal", (1, 2, 200, 210), {}),
    "float16": ((2, 50, 110, 2, 2, 24, 40), "float16", "padding", (1, 1, 1, 110), {}),
    "bits": ((2, 150, 141, 4, 2, 16, 16), "float32", "bits", (2, 1, 150, 141), {"softmax_scale": -0.4}),
    "bias of queries": ((2, 50, 110, 2, 2, 16, 16), "float32", "causal", (2, 2, 50, 1), {}),
    "bias of keys": ((1, 40, 110, 2, 1, 16, 16), "float32", "none", (1, 1, 1, 110), {"logits_soft_cap": 1.5}),
    "bias of a head": ((2, 40, 50, 2, 2, 16, 16), "float32", "none", (1, 2, 1, 1), {}),
    "bias of 16 bits": ((1, 40, 50, 2, 2, 16, 16), "float32", "none", "bfloat16", {}),
    "ALiBi": ((2, 70, 110, 4, 2, 16, 16), "float32", "causal", "ALiBi", {}),
    "dropout": ((2, 70, 110, 4, 2, 16, 16), "float32", "segments", None, {"dropout_key": jax.random.key(3)}),
    "a limit that int64 does not hold": ((1, 40, 50, 2, 1, 16, 16), "float32", "far", None, {}),
    "wide heads": ((1, 30, 45, 2, 1, 576, 512), "float32", "causal", None, {}),
    # Few queries, read where keys and values lie: in the last one most keys of a row, and all of another, are hidden.
    "few": ((2, 5, 150, 6, 2, 33, 20), "bfloat16", "causal", None, {"sinks": draw(6)}),
    "few of a window": ((1, 9, 1100, 4, 4, 16, 16), "float32", "window", None, {"logits_soft_cap": 2.0}),
    "few in segments": ((2, 7, 150, 4, 2, 16, 70), "float32", "segments", (2, 1, 7, 150), {"softmax_scale": -0.4}),
    "few with a bias of 16 bits": ((1, 16, 140, 2, 2, 16, 16), "float16", "none", "bfloat16", {}),
    "few with ALiBi": ((2, 3, 333, 8, 2, 16, 16), "float32", "causal", "ALiBi", {"sinks": draw(8)}),
    "few of many keys": ((1, 40, 1030, 4, 2, 64, 64), "float32", "padding", None, {}),
    "few that see nothing": ((2, 3, 130, 4, 1, 40, 24), "float32", "hidden", (1, 4, 1, 130), {"sinks": draw(4)}),
}


def problem(name: str) -> Problem:
    (B, T, S, H, K, D, Dv), dtype, mask, bias, options = CASES[name]
    arrays = {
        "query": draw(B, T, H, D, dtype=dtype),
        "key": draw(B, S, K, D, dtype=dtype),
        "value": draw(B, S, K, Dv, dtype=dtype),
    }
    options = options | {"return_lse": True, "return_max_logits": True}
    if mask != "none":
        options["mask"] = mask_of(mask, B, T, S)
    if bias == "ALiBi":
        options["bias"] = ALiBi(np.linspace(0.01, 0.5, H).astype(np.float32))
    elif bias is not None:
        options["bias"] = draw(1, H, T, S, dtype=bias) if isinstance(bias, str) else draw(*bias)
    fields = {"dropout_prob": 0.3} if "dropout_key" in options else {}
    metadata = OperationMetadata(on_unsupported="error", mode="train", **fields)  # type: ignore[arg-type]
    return Problem(**arrays, options=options, metadata=metadata)


def check(name: str) -> None:
    given = problem(name)
    operation: Any = OperationRegistry.create("attnops-cpu:flash", given.metadata)
    given.check(operation, False)
    given.check(operation, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_agrees_with_the_oracle(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_subnormal_numbers_of_float16_are_not_0() -> None:
    q, v = draw(1, 40, 1, 8, dtype="float16"), np.full((1, 40, 1, 21), 3e-6, np.float16)
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    found = jax.jit(lambda q, v: operation(q, q, v).attention_outputs)(q, v)
    np.testing.assert_allclose(np.asarray(found, np.float32), v.astype(np.float32), rtol=0, atol=1e-7)


OTHERS = [name for name in library().available if name != library().isa]


@pytest.mark.slow
@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("each", [pytest.param(True, marks=pytest.mark.exhaustive), False], ids=["each", "a part"])
def test_cases_agree_with_the_oracle_with_other_instructions(isa: str, each: bool) -> None:
    """Of the kernels' other sets of instructions; a part: the cases are divided among the sets."""
    names = [*CASES] if each else [*CASES][OTHERS.index(isa) :: len(OTHERS)]
    # With the tests' cache: in the programs of the cases nothing tells which instructions their kernels have.
    program = (
        "import os, conftest\n"
        "os.environ.pop('ATTNOPS_DISABLE', None)\n"
        "import attnops, attnops_cpu, test_kernels as t\n"
        "from attnops_cpu.library import library\n"
        "attnops.OperationRegistry.register(attnops_cpu.CpuFlashAttention)\n"
        f"for name in {names}: t.check(name)\n"
        "t.test_subnormal_numbers_of_float16_are_not_0()\n"
        "print(library().isa, 'right')"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ATTNOPS_CPU_ISA": isa, "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == [f"{isa} right"], found.stderr[-3000:]


def test_the_tile_map_has_bits_for_partial_tiles_alone_and_agrees_with_the_mask() -> None:
    B, T, S, block_q, block_k = 2, 70, 150, 20, 64
    metadata = OperationMetadata(block_q=block_q, block_k=50)  # rounded up to a multiple of a panel
    for traced in (False, True):
        lengths = KeyPadding(np.arange(S)[None] < np.array([[100], [30]]))
        mask: Mask = (Causal() & lengths).bind(B, 1, T, S)
        if traced:
            mask = jax.tree.map(jnp.asarray, mask)
        q, k = jnp.zeros((B, T, 1, 8)), jnp.zeros((B, S, 1, 8))
        call = FlashCall(metadata, q, k, k, mask=mask, softmax_scale=1.0)
        plan = CpuFlash().plan(call)
        assert (plan.block_q, plan.block_k) == (block_q, block_k)
        found = jax.tree.map(np.asarray, jax.jit(lambda plan=plan, mask=mask: tile_map(plan, mask))())
        q_index, kv_index = np.ogrid[:T, :S]
        expected = (kv_index <= q_index + S - T) & (kv_index < np.array([100, 30]).reshape(B, 1, 1, 1))
        bits = 0
        for b, _, i, j in np.ndindex(found.tiles.shape):
            tile = expected[b, 0, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            code = found.tiles[b, 0, i, j]
            if code < 0:
                assert tile.all() if code == FULL else not tile.any()
                assert code in (EMPTY, FULL)
                continue
            bits += 1
            words = found.bits[b, code]
            seen = (words[:, :, None] >> np.arange(PANEL, dtype=np.uint32) & 1).reshape(block_q, block_k)
            np.testing.assert_array_equal(seen[: tile.shape[0], : tile.shape[1]], tile)
        assert 0 < bits < found.tiles.size
        if not traced:
            assert found.bits.shape[1] == max((each >= 0).sum() for each in found.tiles)


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv + h) % 5 > 1


@pytest.mark.parametrize(
    ("T", "S", "options", "few", "in_place"),
    [
        (4, 300, {}, True, True),
        (4, 100, {}, False, True),
        (8, 300, {}, True, False),
        (8, 1024, {}, True, True),
        (24, 1024, {}, False, True),
        (25, 1024, {}, False, False),
        (24, 1023, {}, False, False),
        (4, 300, {"mask": MaskFn(by_head)}, True, False),
        (4, 300, {"dropout_key": 1}, True, False),
    ],
)
def test_which_kernel_computes_few_queries_and_what_explain_says(
    T: int, S: int, options: dict[str, Any], few: bool, in_place: bool
) -> None:
    options = options | ({"dropout_key": jax.random.key(1)} if "dropout_key" in options else {})
    dropout_prob = 0.5 if "dropout_key" in options else 0.0
    operation: Any = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(dropout_prob=dropout_prob))
    query, key = (jax.ShapeDtypeStruct((1, n, h, 16), jnp.float32) for n, h in ((T, 4), (S, 1)))
    details = list(operation.details(operation.request(query, key, key, **options)))
    assert (IN_PLACE in details) == in_place
    assert (FEW in details) == (few and not in_place)
    assert (FEW_GRADIENTS in details) == (few and in_place)
    assert (PACKED_GRADIENTS in details) == (not few and in_place)

    def out(q: jax.Array, k: jax.Array) -> jax.Array:
        return operation(q, k, k, **options).attention_outputs

    program = jax.jit(out).lower(query, key).as_text()
    assert ("attnops_cpu_forward" in program) == (in_place or not few)
    assert ("in_place = true" in program) == in_place
    differentiated = jax.jit(jax.grad(lambda q, k: out(q, k).sum())).lower(query, key).as_text()
    assert ("attnops_cpu_forward" in differentiated) == (not few)
    assert "in_place = true" not in differentiated


@pytest.mark.slow
def test_few_queries_have_the_derivatives_of_many_and_the_same_bits_in_every_batch() -> None:
    operation: Any = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    native: Any = OperationRegistry.create("attnops:flash")
    q, k = (jnp.asarray(draw(2, n, h, 16)) for n, h in ((3, 4), (300, 2)))

    def loss(op: Any, q: jax.Array, k: jax.Array) -> jax.Array:
        return (op(q, k, k, mask=Causal()).attention_outputs ** 2).sum()

    def twice(op: Any, q: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x + 0.1 * loss(op, x, k) * x, None), q, None, length=2)[0].sum()

    for derivative in (
        lambda op: jax.grad(functools.partial(loss, op), (0, 1))(q, k),
        lambda op: jax.jvp(jax.grad(lambda q: loss(op, q, k)), (q,), (q,))[1],
        lambda op: jax.hessian(functools.partial(twice, op))(q[:, :1]),
        lambda op: jax.vmap(jax.grad(functools.partial(loss, op)), (0, None))(jnp.stack([q, 2 * q]), k),
    ):
        found, expected = (jax.tree.leaves(jax.jit(functools.partial(derivative, op))()) for op in (operation, native))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    both = jax.jit(lambda q: operation(q, k, k).attention_outputs)(q)
    each = [jax.jit(lambda q, k: operation(q, k, k).attention_outputs)(q[b : b + 1], k[b : b + 1]) for b in (0, 1)]
    np.testing.assert_array_equal(both, jnp.concatenate(each))
    mapped = jax.jit(jax.vmap(lambda q, k: operation(q, k, k).attention_outputs))(q[:, None], k[:, None])
    np.testing.assert_array_equal(both, mapped[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2, 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_infinite_value_of_the_last_key_makes_outputs_infinite_and_not_nan(dtype: str, T: int) -> None:
    operation: Any = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    q, k, v = draw(1, T, 2, 16, dtype=dtype), draw(1, 1031, 1, 16, dtype=dtype), draw(1, 1031, 1, 40, dtype=dtype)
    v[0, -1, 0, [3, 35]] = np.inf, -np.inf
    found = np.asarray(jax.jit(lambda q, k, v: operation(q, k, v).attention_outputs)(q, k, v), np.float32)
    assert (found[..., 3] == np.inf).all()
    assert (found[..., 35] == -np.inf).all()
    assert np.isfinite(np.delete(found, [3, 35], axis=-1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_large_numbers_and_a_small_scale_do_not_overflow(dtype: str) -> None:
    operation: Any = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))
    for T in (3, 30):
        q, k, v = (draw(1, n, 1, 16) * size for n, size in ((T, 1.5e19), (1031, 1.5e19), (1031, 1)))
        arrays = [x.astype(jnp.dtype(dtype)) for x in (q, k, v)]
        found = jax.jit(lambda *x: operation(*x, softmax_scale=2e-38).attention_outputs)(*arrays)
        expected = oracle.attention(*arrays, softmax_scale=2e-38).out
        tolerance = 1e-4 if dtype == "float32" else 3e-2
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_bands_need_no_tile_map_and_segments_no_bits() -> None:
    q = jnp.zeros((1, 64, 1, 8))
    for mask, has_tiles in ((Causal() & SlidingWindow(5, 1), False), (Causal() & Segments(np.arange(64) // 9), True)):
        bound = mask.bind(1, 1, 64, 64)
        call = FlashCall(OperationMetadata(), q, q, q, mask=bound, softmax_scale=1.0)
        found = jax.eval_shape(lambda call=call: CpuFlash().schedule(CpuFlash().plan(call), call))
        assert (found.tiles is not None) == has_tiles
        assert found.bits is None


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_tokens_that_no_query_sees_may_hold_nan_whatever_else_their_panel_has(dtype: str, tolerance: float) -> None:
    T = 70
    q, k, v = (draw(1, T, 2, 16, dtype=dtype) for _ in range(3))
    hidden = np.arange(T) % 3 == 1
    for x in (k, v):
        x[:, hidden] = np.nan
    operation = OperationRegistry.create("attnops-cpu:flash", OperationMetadata(on_unsupported="error"))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (operation(q, k, v, mask=KeyPadding(~hidden[None])).attention_outputs ** 2).sum()

    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    kept = (q, *(jnp.asarray(np.where(hidden[None, :, None, None], 0, x)) for x in (k, v)))
    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*kept)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["low", "plain", "bias", "dropout"])
def test_partial_softmaxes_merge_to_vanilla_over_all_keys(features: str) -> None:
    check_partial("attnops-cpu:flash", "cpu", features, block_q=16, block_k=32)
