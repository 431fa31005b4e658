"""Hopper's kernels, whose warps have different tasks: simulated, and compiled."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specialised_kernels import (
    NAME,
    SLOW,
    both,
    check_figures,
    compile_cases,
    documents,
    is_noticed,
    launched,
    names_of_simulated,
    specialised,
    told,
)
from triton_mistakes import with_mistakes

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Dense, Mask, Segments, SlidingWindow
from attnops_testing import attention, attention_gradients
from attnops_triton import versions
from attnops_triton.aot import kernels
from attnops_triton.flash import plan
from attnops_triton.flash.order import unordered
from attnops_triton.flash.specialised import CallFacts, why_plain
from attnops_triton.language import assembler, call, simulator
from attnops_triton.language.assembler import Assembler
from attnops_triton.language.build import build
from attnops_triton.language.source import KernelFunction, shape_of_map
from attnops_triton.targets import target

PROBLEMS = [
    pytest.param((200, 200, 4, 2, 64), {"mask": Causal()}, id="causal, ragged, grouped"),
    pytest.param((256, 256, 2, 2, 128), {"mask": Causal() & SlidingWindow(70, 0)}, id="window", marks=SLOW),
    pytest.param((300, 300, 2, 1, 64), {"mask": documents(300)}, id="documents", marks=SLOW),
    pytest.param((130, 300, 2, 2, 64), {}, id="no mask, more keys than queries", marks=SLOW),
    pytest.param((150, 150, 1, 1, 256), {"mask": Causal()}, id="D 256", marks=SLOW),
    pytest.param((140, 140, 2, 1, 64), {"mask": Causal(), "unordered": True}, id="dq added"),
    pytest.param((70, 70, 2, 1, 64), {"mask": Causal(), "unordered": True, "mapped": True}, id="dq added, mapped",
                 marks=SLOW),
    pytest.param((200, 200, 2, 1, 128), {"mask": documents(200), "unordered": True}, id="dq added, D 128", marks=SLOW),
    pytest.param((150, 300, 2, 2, 128), {"unordered": True}, id="dq added, no mask", marks=SLOW),
    pytest.param((200, 200, 2, 1, 128), {"mask": documents(200), "logits_soft_cap": 3.0}, id="soft cap", marks=SLOW),
    pytest.param((150, 150, 2, 1, 256), {"mask": documents(150), "logits_soft_cap": 3.0}, id="D 256, soft cap",
                 marks=SLOW),
    pytest.param((140, 140, 2, 2, 64), {"mask": Causal(), "sinks": np.array([0.5, -1.0], np.float32)}, id="sinks",
                 marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), PROBLEMS)
@pytest.mark.slow
@pytest.mark.tier(every=5)
def test_simulated_they_are_right(
    sizes: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    T, S, H, K, D = sizes
    run = names_of_simulated(monkeypatch)
    options = dict(options)
    adds_dq, is_mapped = options.pop("unordered", False), options.pop("mapped", False)
    if adds_dq:  # else groups are split, since programs are few
        monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)
    rng = np.random.default_rng(0)
    q, d_out = (rng.normal(size=(2, T, H, D)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(2, S, K, D)).astype(np.float32) for _ in range(2))
    with target("sm_90"), unordered() if adds_dq else contextlib.nullcontext():
        attend = both(options, interpret=True)
        if is_mapped:  # a call of one row for each row
            found = jax.vmap(lambda *x: [y[0] for y in attend(*(y[None] for y in x))])(q, k, v, d_out)
        else:
            found = attend(q, k, v, d_out)
        jax.block_until_ready(found)
    assert len(run) == (3 if D <= 128 and not adds_dq else 2), "the kernel for dk and dv has too many sums at D 256"
    assert not adds_dq or run[-1] == "attnops_flash_backward"
    mask = options.get("mask")
    dense = None if mask is None else np.asarray(mask.dense(2, H, T, S))
    rest = {name: x for name, x in options.items() if name != "mask"}
    np.testing.assert_allclose(found[0], attention(q, k, v, mask=dense, **rest).out, atol=5e-6)
    expected = attention_gradients(q, k, v, d_out=d_out, mask=dense, **rest).values
    for own, name in zip(found[1:], ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(own, expected[name], atol=2e-5)


@pytest.mark.parametrize("adds_dq", [False, True], ids=["dq alone", "dq added"])
@pytest.mark.parametrize("mapped", ["query", "key", "value", "cotangent"])
@pytest.mark.slow
@pytest.mark.tier(every=5)
def test_simulated_one_array_is_mapped(mapped: str, adds_dq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapped array has two batches, the others one, whose tensor maps have another index of the batch."""
    monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)
    run = names_of_simulated(monkeypatch)
    rng = np.random.default_rng(0)
    names = ("query", "key", "value", "cotangent")
    axes = tuple(0 if name == mapped else None for name in names)
    shapes = [(1, 70 if name in ("query", "cotangent") else 130, 2, 64) for name in names]
    given = [rng.normal(size=shape if axis is None else (2, *shape)).astype(np.float32)
             for shape, axis in zip(shapes, axes, strict=True)]  # fmt: skip
    with target("sm_90"), unordered() if adds_dq else contextlib.nullcontext():
        found = jax.block_until_ready(jax.vmap(both({}, interpret=True), axes)(*given))
    assert len(set(run)) == (2 if adds_dq else 3)
    for i in range(2):
        q, k, v, d_out = (x if axis is None else x[i] for x, axis in zip(given, axes, strict=True))
        np.testing.assert_allclose(found[0][i], attention(q, k, v).out, atol=5e-6)
        expected = attention_gradients(q, k, v, d_out=d_out).values
        for own, name in zip(found[1:], names, strict=False):
            np.testing.assert_allclose(own[i], expected[name], atol=2e-5)


@pytest.mark.slow
def test_simulated_the_largest_scores_are_without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = names_of_simulated(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 200, 2, 64)).astype(np.float32) for _ in range(3))
    sinks = np.array([0.5, 9.0], np.float32)  # below and above the largest scores
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target("sm_90"):
        found = operation(q, k, v, mask=Causal(), sinks=sinks, return_lse=True, return_max_logits=True)
        jax.block_until_ready(found)
    assert run
    expected = attention(q, k, v, mask=np.tril(np.ones((1, 1, 200, 200), bool)), sinks=sinks)
    for actual, exact in ((found.max_logits, expected.max_logits), (found.logsumexp, expected.logsumexp)):
        np.testing.assert_allclose(actual, exact, atol=5e-6)


@pytest.mark.parametrize("D", [pytest.param(16, id="ordinary"), pytest.param(64, id="specialised", marks=SLOW)])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.slow
def test_groups_are_split_where_programs_are_few(D: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "multiprocessors", lambda arch: multiprocessors)
    rng = np.random.default_rng(0)
    T, H = 70, 4
    q, d_out = (rng.normal(size=(1, T, H, D)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(1, T, 1, D)).astype(np.float32) for _ in range(2))
    run = both({"mask": Causal()}, interpret=True)
    with target("sm_90"):
        found = run(q, k, v, d_out)
        *_, by_key = kernels(run, (q, k, v, d_out), "sm_90")
    tiles_of_keys = -(-T // by_key.tiles.bk)
    assert by_key.programs == tiles_of_keys * (1 if multiprocessors == 1 else H)
    mask = np.tril(np.ones((1, 1, T, T), bool))
    expected = attention_gradients(q, k, v, d_out=d_out, mask=mask).values
    for own, name in zip(found[1:], ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(own, expected[name], atol=2e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_functions_of_a_kernel_have_different_names(arch: str) -> None:
    """Else the interpreter and the simulator would run one in place of the other."""
    for each in launched(64, documents(256), arch=arch):
        assert f"def {each.recipe.kernel.name}(" in each.recipe.kernel.text


MISTAKES = {
    "values are read before they are there": ("mbarrier.wait(v.ready.index(before), phase_before)", "pass"),
    "buffers of keys are never free": ("mbarrier.arrive(k.free.index(stage))", "pass"),
    "buffers of values are never free": ("mbarrier.arrive(v.free.index(before))", "pass"),
    "the turn is never passed on": ("mbarrier.arrive(turn.index(1 - group))", "pass"),
    "buffers are overwritten": ("mbarrier.wait(ring.free.index(stage), phase)", "pass"),
    "scores are read before they are computed": ("s = warpgroup_mma_wait(1, deps=[s])", "pass"),
    "a buffer is free before its product is over": (
        "s = warpgroup_mma_wait(1, deps=[s])\n", "mbarrier.arrive(k.free.index(stage))\n"
    ),
    "the phase of the ring stays": ("phase = phase ^ 1", "pass"),
    "fewer bytes are expected": (
        "mbarrier.expect(ring.ready.index(stage), size)", "mbarrier.expect(ring.ready.index(stage), 16)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_simulator_notices_mistakes_with_barriers(mistake: str | None) -> None:
    assert is_noticed("sm_90", 640, *MISTAKES.get(mistake or "", ())) is (mistake is not None)


MISTAKES_OF_DQ = {
    "ds of the other partition is not waited for": ("mbarrier.wait(shared.own.ds_ready.index(0), side)", "pass"),
    "dq is added before it is there": ("mbarrier.wait(dq.ready.index(half), side)", "pass"),
    "dq is overwritten": ("mbarrier.wait(shared.own.free.index(group), side ^ 1)", "pass"),
    "the buffer of dq is never free": ("mbarrier.arrive(dq.free.index(half))", "pass"),
    "the buffer of dq is free before it was read": ("tma.store_wait(0)", "pass"),
    "dq replaces what is there": ("tma.async_atomic_add(x.dq", "tma.async_store(x.dq"),
    "the columns of keys are not waited for": ("mbarrier.wait(shared.own.keys_ready.index(0), 0)", "pass"),
    "the logsumexp is not waited for": ("mbarrier.wait(q_ring.ready.index(stage), phase)", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, *MISTAKES_OF_DQ])
def test_the_simulator_notices_mistakes_with_dq(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []
    real = simulator.simulate

    def changed(kernel: KernelFunction, *given: Any) -> None:
        if mistake is not None and kernel.name == "attnops_flash_backward":
            replaced.append(mistake)
            kernel = with_mistakes(kernel, *MISTAKES_OF_DQ[mistake])
        real(kernel, *given)

    monkeypatch.setattr(simulator, "simulate", changed)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(1, 640, 1, 64)).astype(np.float32) for _ in range(4)]

    def wrong() -> bool:
        try:
            with target("sm_90"), unordered():
                found = jax.block_until_ready(both({}, interpret=True)(*given))[1:]
        except jax.errors.JaxRuntimeError:
            return True
        *inputs, d_out = given
        expected = attention_gradients(*inputs, d_out=d_out).values
        names = ("query", "key", "value")
        return not all(np.allclose(own, expected[name], atol=2e-5) for own, name in zip(found, names, strict=True))

    assert wrong() is (mistake is not None)
    assert bool(replaced) is (mistake is not None)


def test_dq_is_added_in_any_order_only_if_asked_to() -> None:
    def names(**options: Any) -> list[str]:
        return [each.recipe.kernel.name.removeprefix("attnops_flash_") for each in launched(64, Causal(), **options)]

    apart = ["forward", "backward_query", "backward_key"]
    assert names(T=32768) == apart
    with unordered():
        assert names(T=32768) == ["forward", "backward"]
        assert names(T=32768, dtype="float16") == apart, "dk and dv are float32, which are not stored by maps"
        assert names(T=256) == apart, "groups are split"


@pytest.mark.slow
def test_tensor_maps_are_parameters() -> None:
    """Four maps of 128 bytes each, and no program makes one: that costs a microsecond and more per map."""
    forward, by_query, by_key = launched(64, None)
    swizzle = 3  # of 128 bytes
    for each, blocks in (
        (forward, [(1, 64, 64), (1, 128, 64), (1, 128, 64), (1, 64, 64)]),  # q, k, v and out
        (by_query, [(1, 64, 64), (1, 64, 64), (1, 64, 64), (1, 64, 64), (1, 64, 64)]),  # q, k, v, d_out and dq
        # q, k, v, d_out and statistics; pointers store dk and dv, since groups are split.
        (by_key, [(1, 64, 64), (1, 64, 64), (1, 64, 64), (1, 64, 64), (2, 64)]),
    ):
        program = build(each.recipe)
        assert program.maps == tuple((swizzle if len(block) == 3 else 0, block) for block in blocks)
        text = program.code.decode()
        assert text.count(".param .align 64 .b8") == len(blocks)
        assert "tensormap.replace" not in text
        assert each.programs > 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.tier(every=2)
def test_what_jaxlib_gets_has_the_order_of_the_code(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With masks that have values, sinks, gradients by map or by pointer, and, for bfloat16, dq added."""

    class Launcher:
        def create_array_parameter(self, *_: Any) -> tuple[str, tuple[int, ...]]:
            return ".b64", ()

        def create_scalar_parameter(self, _: int, kind: str) -> tuple[str, tuple[int, ...]]:
            return f".b{kind[1:]}", ()

        def create_tma_descriptor_parameter(
            self, kind: int, swizzle: int, shape: Any, strides: Any, block: list[int], fill: int
        ) -> tuple[str, tuple[int, ...]]:
            return ".b8", tuple(block)

    monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)
    x = jax.ShapeDtypeStruct((1, 300, 4, 64), jnp.dtype(dtype))
    options = {"mask": documents(300), "sinks": np.zeros(4, np.float32)}
    with unordered():
        found = kernels(both(options), (x, x, x, x), "sm_90")
    assert [each.recipe.kernel.blocks != () for each in found] == [True] * (2 if dtype == "bfloat16" else 3)
    for each in found:
        kernel, program = each.recipe.kernel, build(each.recipe)
        shapes = [(1, 4, 2, 320) if name == "statistics" else x.shape for name in kernel.pointers]
        arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        given = call._parameters(Launcher(), each.recipe, program, arrays, each.integers)
        head = program.code.decode().split(".entry", 1)[1].split(")", 1)[0]
        in_code = [re.sub(r"\.[uf]", ".b", kind) for kind in re.findall(r"\.param.*?(\.[buf]\d+)", head)]
        # The last two are the scratch memory that Triton may use, for which jaxlib passes null.
        assert [kind for kind, _ in given] == in_code[:-2]
        # Blocks with rows of more than 128 bytes are copied in parts.
        dtypes, blocks = dict(zip(kernel.pointers, each.recipe.dtypes, strict=True)), dict(kernel.blocks)
        widest = {name: 32 if dtypes[name] == "float32" else 64 for name in blocks if name != "statistics"}
        expected = [(*block[:-1], min(block[-1], widest.get(name, block[-1])))
                    for name in kernel.pointers if (block := blocks.get(name)) is not None]  # fmt: skip
        assert [block for _, block in given if block] == expected


def test_what_jaxlib_gets_for_a_tensor_map() -> None:
    class Launcher:
        def create_tma_descriptor_parameter(self, *given: Any) -> tuple[Any, ...]:
            return given

        def create_scalar_parameter(self, *given: Any) -> tuple[Any, ...]:
            return given

    shape = shape_of_map((2, 1000, 4, 64), (1, 128, 64))
    assert call._map(Launcher(), shape, "bfloat16", 3, (1, 128, 64)) == [
        (9, 3, [2, 1000, 256], [256000, 256, 1], [1, 128, 64], 0),
        (2, "i32"), (1000, "i32"), (256, "i32"), (256000, "i64"), (256, "i64"), (1, "i64"),
    ]  # fmt: skip
    assert shape_of_map((2, 4, 2, 1024), (2, 64)) == (16, 1024)


@pytest.mark.parametrize(("D", "dtype", "T", "K", "mask", "cap"), compile_cases("sm_90"))
def test_they_fit_and_spill_nothing(D: int, dtype: str, T: int, K: int, mask: Mask | None, cap: float | None) -> None:
    check_figures("sm_90", D, dtype, T, K, mask, cap)


@pytest.mark.parametrize(
    ("D", "mask", "options", "expected"),
    [
        (64, None, {}, [True] * 3),
        (128, documents(256), {}, [True] * 3),
        (256, Causal(), {}, [True, True, False]),
        (96, Causal(), {}, [False] * 3),
        (128, Dense(np.tri(256, dtype=bool)[None, None]), {}, [False] * 3),
        (128, Segments(np.arange(256) // 90, np.arange(256) // 80), {}, [False] * 3),
        (128, Causal(), {"dtype": "float32"}, [False] * 3),
        (128, Causal(), {"bias": jnp.ones((1, 4, 256, 256))}, [False] * 3),
        (128, Causal(), {"dropout_key": jax.random.key(0)}, [False] * 3),
    ],
)
def test_the_others_serve_what_they_do_not(
    D: int, mask: Mask | None, options: dict[str, Any], expected: list[bool]
) -> None:
    assert specialised(launched(D, mask, **options)) == expected
    assert [("Gluon" in part) for part in told(D, mask, **options)] == expected


@pytest.mark.slow
def test_old_versions_and_assemblers_have_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(versions, "version_of", {"triton": "3.8.0", "jax": "0.10.2"}.get)
        assert specialised(launched(64, None)) == [False] * 3
    told_by_version = {}
    for version in ("0.11.0", "0.11.1"):
        monkeypatch.setattr(versions, "version_of", {"triton": "3.9.0", "jaxlib": version}.get)
        with target("sm_90"):
            told_by_version[version] = why_plain("sm_90", CallFacts("bfloat16", 64, 64, (256, 256), *[False] * 7))
    assert "jaxlib 0.11.1" in told_by_version["0.11.0"]
    assert not told_by_version["0.11.1"]

    def here(release: tuple[int, int]) -> bool:
        from attnops_triton.flash import specialised as module

        monkeypatch.setattr(assembler, "find", lambda: Assembler(Path("ptxas"), release))
        return module._is_supported()

    assert [here((12, 6)), here((12, 8))] == [False, True]
