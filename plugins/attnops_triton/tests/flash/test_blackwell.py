"""Blackwell's kernels, whose products are in tensor memory: simulated, and compiled."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specialised_kernels import (
    NAME,
    SLOW,
    assert_spills_little,
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
from triton_assemblers import ASSEMBLERS
from triton_mistakes import with_mistakes

from attnops import OperationMetadata, OperationRegistry, explain
from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal, Mask, Segments, SlidingWindow
from attnops_testing import attention, attention_gradients
from attnops_triton.aot import compile_for, kernels
from attnops_triton.flash import backend, backward, plan
from attnops_triton.flash.tile_sizes import SPECIALISED
from attnops_triton.language import interpreter, simulator
from attnops_triton.language.build import build
from attnops_triton.language.launch import recording
from attnops_triton.language.source import KernelFunction
from attnops_triton.targets import SHARED_MEMORY, target

FORWARD = [
    pytest.param((300, 300, 2, 1, 64), {"mask": Causal()}, id="causal, ragged, grouped"),
    pytest.param((512, 768, 1, 1, 128), {}, id="no mask", marks=SLOW),
    pytest.param((700, 700, 2, 1, 64), {"mask": Causal() & SlidingWindow(200, 0)}, id="window", marks=SLOW),
    pytest.param((300, 700, 2, 2, 128), {"mask": Causal()}, id="more keys than queries", marks=SLOW),
    pytest.param((600, 600, 2, 1, 64), {"mask": documents(600), "logits_soft_cap": 3.0}, id="cap, ids", marks=SLOW),
    pytest.param((512, 512, 1, 1, 64), {"mask": documents(512)}, id="documents", marks=SLOW),
    pytest.param((300, 300, 2, 2, 64), {"mask": Causal(), "sinks": np.array([0.5, 9.0], np.float32)}, id="sinks",
                 marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), FORWARD)
@pytest.mark.slow
@pytest.mark.tier(every=7)
def test_simulated_blackwells_forward_is_right(
    sizes: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    T, S, H, K, D = sizes
    run = names_of_simulated(monkeypatch)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, T, H, D)).astype(np.float32)
    k, v = (rng.normal(size=(2, S, K, D)).astype(np.float32) for _ in range(2))
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target("sm_100"):
        found = jax.block_until_ready(operation(q, k, v, return_lse=True, return_max_logits=True, **options))
    assert run
    mask = options.get("mask")
    dense = None if mask is None else np.asarray(mask.dense(2, H, T, S))
    expected = attention(q, k, v, mask=dense, **{name: x for name, x in options.items() if name != "mask"})
    np.testing.assert_allclose(found.attention_outputs, expected.out, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=5e-6)
    np.testing.assert_allclose(found.max_logits, expected.max_logits, atol=5e-6)


BACKWARD = [
    pytest.param((150, 150, 2, 1, 64), {"mask": Causal()}, id="causal, ragged, grouped"),
    pytest.param((256, 384, 1, 1, 128), {}, id="no mask", marks=SLOW),
    pytest.param((130, 300, 2, 2, 64), {}, id="no mask, more keys than queries", marks=SLOW),
    pytest.param((150, 150, 2, 1, 64), {"mask": Causal(), "apart": True}, id="a loop over heads", marks=SLOW),
    pytest.param((300, 300, 4, 2, 64), {"mask": Causal(), "split": True}, id="split groups", marks=SLOW),
    pytest.param((300, 300, 2, 1, 128), {"mask": documents(300), "logits_soft_cap": 3.0}, id="cap, ids", marks=SLOW),
    pytest.param((256, 256, 2, 2, 64), {"mask": Causal() & SlidingWindow(70, 0),
                                        "sinks": np.array([0.5, -1.0], np.float32)}, id="sinks", marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=[SLOW, pytest.mark.exhaustive])])
@pytest.mark.parametrize(("sizes", "options"), BACKWARD)
@pytest.mark.tier(every=6)
def test_simulated_blackwells_backward_is_right(
    sizes: tuple[int, ...], options: dict[str, Any], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, S, H, K, D = sizes
    options = dict(options)
    monkeypatch.setattr(simulator, "EAGER", eager)
    if not options.pop("split", False):  # else groups are split, since programs are few
        monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)
    if options.pop("apart", False):
        monkeypatch.setattr(backward, "_is_flat", lambda *_: False)
    run = names_of_simulated(monkeypatch)
    rng = np.random.default_rng(0)
    q, d_out = (rng.normal(size=(1, T, H, D)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(1, S, K, D)).astype(np.float32) for _ in range(2))
    with target("sm_100"):
        found = jax.block_until_ready(both(options, interpret=True)(q, k, v, d_out))
    assert len(run) == 3, "no kernel is interpreted by Triton"
    mask = options.get("mask")
    dense = None if mask is None else np.asarray(mask.dense(1, H, T, S))
    rest = {name: x for name, x in options.items() if name != "mask"}
    expected = attention_gradients(q, k, v, d_out=d_out, mask=dense, **rest).values
    for own, name in zip(found[1:], ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(own, expected[name], atol=5e-6)


def held_up(name: str, half: int) -> tuple[str, str]:
    """A replacement that makes one half later than the other."""
    wait = f"mbarrier.wait(own.{name}_ready.index(0), done & 1)\n"
    return wait, wait.rstrip() + f"; group == {half} and pause()\n"


def without_wait(half: int, name: str) -> tuple[str, ...]:
    """Replacements without the wait for one half of the weights, ``w``, or of the gradients of scores, ``ds``."""
    wait = "mbarrier.wait(ready.index(half), turn & 1)"
    return (
        f"own.{name}_ready, ", f"(own.{name}_ready, {half}), ", wait,
        f"ready, late = ready if isinstance(ready, tuple) else (ready, None); half == late or {wait}",
        "    for half in gl.static_range(2):\n        ready", "    given = ready\n"
        "    for half in gl.static_range(2):\n        ready = given\n        ready",
    )  # fmt: skip


# By kernel.
MISTAKES_OF_BACKWARD = {
    "keys are not waited for": ("query", "mbarrier.wait(ring.ready.index(stage), phase)", "pass"),
    "values are not waited for": ("query", "mbarrier.wait(other.ready.index(stage), phase)", "pass"),
    "queries are not waited for": ("query", "mbarrier.wait(shared.ready.index(0), 0)", "pass"),
    "scores are not waited for": ("query", "mbarrier.wait(own.s_ready.index(done % 2), done // 2 & 1)", "pass"),
    "dp is not waited for": ("query", "mbarrier.wait(own.dp_ready.index(0), done & 1)", "pass"),
    "ds of a half is not waited for": ("query", *without_wait(1, "ds"), *held_up("dp", 1)),
    "ds never comes": ("query", "mbarrier.arrive(own.ds_ready.index(group))", "pass"),
    "dq is not waited for": ("query", "mbarrier.wait(own.finished.index(0), 0)", "pass"),
    "products of ds free nothing": ("query", "mbarriers=[ring.free.index(stage)]", "mbarriers=[]"),
    "buffers are overwritten": ("query", "mbarrier.wait(ring.free.index(stage), phase)", "pass"),
    "scores have one buffer": (
        "query", "own.s.index(buffer)", "own.s.index(0)", "half_of(own.s, done % 2,", "half_of(own.s, 0,",
        "done // 2 & 1)", "done // 2 & 1); pause()",
    ),
    "the phase of the ring stays": ("query", "phase = phase ^ 1", "pass"),
    "the logsumexp is not waited for": (
        "key", "mbarrier.wait(shared.rings[0].ready.index(stage), phase)", "pass",
        "tma.async_load(x.statistics", "pause(); tma.async_load(x.statistics",
    ),
    "weights of a half are not waited for": ("key", *without_wait(0, "w"), *held_up("s", 0)),
    "weights never come": ("key", "mbarrier.arrive(own.w_ready.index(group))", "pass"),
    "cotangents are not waited for": ("key", "mbarrier.wait(other.ready.index(stage), phase)", "pass"),
    "ds of a half of queries is not waited for": ("key", *without_wait(0, "ds"), *held_up("dp", 0)),
    "products of weights free nothing": ("key", "mbarriers=[ring.free.index(stage)]", "mbarriers=[]"),
    "queries are overwritten": ("key", "mbarrier.wait(ring.free.index(stage), phase)", "pass"),
    "queries are free before ds was multiplied": (
        "key", "mbarriers=[own.s_ready.index(buffer)]",
        "mbarriers=[own.s_ready.index(buffer), ring.free.index(stage), ring.free.index(stage)]",
        "multiply_halves(own.dp,", "pause(); multiply_halves(own.dp,",
    ),
}  # fmt: skip


# What the kernels without a mistake write in the test below, by name: for each of its cases the same.
RIGHT: dict[str, list[np.ndarray]] = {}


@pytest.mark.parametrize("mistake", [None, *MISTAKES_OF_BACKWARD])
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_the_simulator_notices_mistakes_with_blackwells_backward(
    mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, *pairs = MISTAKES_OF_BACKWARD[mistake] if mistake is not None else ("",)
    two = [SPECIALISED["sm_100"][64][0], *(dataclasses.replace(SPECIALISED["sm_100"][64][i], stages=2) for i in (1, 2))]
    monkeypatch.setitem(SPECIALISED["sm_100"], 64, dict(enumerate(two)))
    replaced: list[str] = []
    real = simulator.simulate

    def changed(given: KernelFunction, integers: Any, programs: int, arrays: Any, results: Any) -> None:
        is_wrong = bool(kernel) and given.name == f"attnops_flash_backward_{kernel}"
        if is_wrong:
            replaced.append(given.name)
            given = with_mistakes(given, *pairs)
        elif given.name in RIGHT:
            for own, known in zip(results, RIGHT[given.name], strict=True):
                own[...] = known
            return
        # The rows of the first program are the last ones.
        real(given, integers, programs if given.name == "attnops_flash_forward" else 1, arrays, results)
        if not is_wrong:
            RIGHT[given.name] = [own.copy() for own in results]

    monkeypatch.setattr(simulator, "simulate", changed)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(1, 640, 1, 64)).astype(np.float32) for _ in range(4)]

    def wrong() -> bool:
        try:
            with target("sm_100"):
                found = jax.block_until_ready(both({}, interpret=True)(*given))[1:]
        except jax.errors.JaxRuntimeError:
            return True
        *inputs, d_out = given
        expected = attention_gradients(*inputs, d_out=d_out).values
        rows = {"query": slice(512, 640), "key": slice(0, 128), "value": slice(0, 128)}
        return not all(np.allclose(own[:, at], expected[name][:, at], atol=2e-5)
                       for own, (name, at) in zip(found, rows.items(), strict=True))  # fmt: skip

    assert wrong() is (mistake is not None)
    assert bool(replaced) is (mistake is not None)


# Whoever multiplies comes late, so that the ring is filled again before.
WEIGHTS_ARE_READY = "mbarrier.arrive(own.w_ready.index(half))"
KEYS_ARE_READY = "mbarrier.wait(k.ready.index(stage), phase)"
HELD_UP_BY_KEYS = (KEYS_ARE_READY, f"pause(); {KEYS_ARE_READY}")
SECOND_WEIGHTS = "mbarrier.wait(own.w_ready.index(half), phase_of_weights)"
MISTAKES_OF_FORWARD = {
    "the sums are read before they are there": ("mbarrier.wait(own.done.index(half), 0)", "pass"),
    "scores are read before they are computed": ("mbarrier.wait(own.s_ready.index(group), phase)", "pass"),
    "scores are multiplied without keys": ("mbarrier.wait(k.ready.index(stage), phase)", "pass"),
    "weights are multiplied without values": ("mbarrier.wait(v.ready.index(before), phase_before)", "pass"),
    "weights are multiplied before they are there": (
        SECOND_WEIGHTS, f"half == 1 or {SECOND_WEIGHTS}", "w.store(", "group == 1 and pause(); w.store(",
    ),
    "queries are not waited for": ("mbarrier.wait(shared.ready.index(1), 0)", "pass"),
    "sums are scaled before it is known by what": (
        "mbarrier.wait(own.alpha_ready.index(half), phase)", "pass", "own.alpha.index(group).store(alpha)",
        "pause(); own.alpha.index(group).store(alpha)",
    ),
    "weights are multiplied before sums are scaled": (
        "            if t > 0:\n", f"            {WEIGHTS_ARE_READY}\n            pause()\n            if t > 0:\n"
    ),
    "the last maximum is not waited for": (
        "mbarrier.wait(own.ml_ready.index(half), 0)", "pass", "own.m.index(group).store(m)",
        "pause(); own.m.index(group).store(m)",
    ),
    "weights never come": ("mbarrier.arrive(own.w_ready.index(group))", "pass"),
    "it is never known by what sums are scaled": ("mbarrier.arrive(own.alpha_ready.index(group))", "pass"),
    "products of scores tell nobody": ("mbarriers=[own.s_ready.index(half), k.free.index(stage)]", "mbarriers=[]"),
    "products of values tell nobody": ("mbarriers=[v.free.index(before)]", "mbarriers=[]"),
    "the last products tell nobody": ("mbarriers=[own.done.index(half)]", "mbarriers=[own.done.index(0)][half:]"),
    "buffers are overwritten": ("mbarrier.wait(ring.free.index(stage), phase)", "pass", *HELD_UP_BY_KEYS),
    "the phase of the ring stays": ("phase = phase ^ 1", "pass", *HELD_UP_BY_KEYS),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [None, *MISTAKES_OF_FORWARD])
@pytest.mark.tier(quick=["None", "the sums are read before they are there"], every=2)
def test_the_simulator_notices_mistakes_with_blackwells_forward(mistake: str | None) -> None:
    assert is_noticed("sm_100", 768, *MISTAKES_OF_FORWARD.get(mistake or "", ())) is (mistake is not None)


@pytest.mark.parametrize(
    ("mask", "bias", "expected"),
    [
        (None, None, True),
        pytest.param(documents(200), None, True, marks=SLOW),
        pytest.param(Causal() & SlidingWindow(np.arange(1, 5)[None] * 30, 0), None, False, marks=SLOW),
        pytest.param(Causal(), alibi_slopes(4), False, marks=SLOW),
    ],
    ids=["no mask", "documents", "window by head", "slope by head"],
)
@pytest.mark.slow
@pytest.mark.tier(every=4)
def test_ordinary_kernels_have_one_loop_over_the_heads_of_a_group(
    mask: Mask | None, bias: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)  # else groups are split
    rng = np.random.default_rng(0)
    T, S, H = 200, 200, 4
    q, d_out = (rng.normal(size=(1, T, H, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(1, S, 2, 16)).astype(np.float32) for _ in range(2))
    run = both({"mask": mask} | ({} if bias is None else {"bias": ALiBi(bias)}), interpret=True)
    with target("sm_100"):
        found = run(q, k, v, d_out)
        *_, by_key = kernels(run, (q, k, v, d_out), "sm_100")
    assert ("for t in range" in by_key.recipe.kernel.text) is expected
    dense = None if mask is None else np.asarray(mask.dense(1, H, T, S))
    distances = np.arange(S) - np.arange(T)[:, None]
    scores = None if bias is None else -np.asarray(bias)[None, :, None, None] * np.abs(distances)
    gradients = attention_gradients(q, k, v, d_out=d_out, mask=dense, bias=scores).values
    for own, name in zip(found[1:], ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(own, gradients[name], atol=2e-5)


def test_rows_without_tiles_are_zero() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float32)
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target("sm_100"):
        (found,) = kernels(lambda *qkv: operation(*qkv).attention_outputs, (q, q, q), "sm_100")
    kernel = found.recipe.kernel
    tiles = ("full_start", "full_stop", "partial_start", "partial_stop")
    integers = tuple(0 if name in tiles else x for name, x in zip(kernel.integers, found.integers, strict=True))
    out, m = np.full((1, 256, 1, 64), np.nan, np.float32), np.full((1, 1, 256), np.nan, np.float32)
    results = [out, m, np.zeros((1, 1, 256), np.float32)]
    interpreter.run_on_host(kernel, integers, 1, [np.ones_like(out)] * 3, results)
    assert not out.any()
    assert (m == -np.inf).all()


@pytest.mark.parametrize(("D", "dtype", "T", "K", "mask", "cap"), compile_cases("sm_100"))
def test_they_fit_and_spill_nothing(D: int, dtype: str, T: int, K: int, mask: Mask | None, cap: float | None) -> None:
    check_figures("sm_100", D, dtype, T, K, mask, cap)


@pytest.mark.parametrize("D", [pytest.param(64, marks=SLOW), 128])
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_blackwells_forward_uses_tensor_memory_and_warps_of_different_tasks(D: int) -> None:
    (forward, *_) = launched(D, Causal(), 4096, arch="sm_100")
    assert build(forward.recipe).threads == 512, (
        "three partitions of four warps, and two of one that are padded to four"
    )
    for ptxas in ASSEMBLERS:
        binary = compile_for(forward, "sm_100", ptxas)
        for name in ("tcgen05.mma", "tcgen05.alloc", "cp.async.bulk.tensor", "setmaxnreg.dec", "setmaxnreg.inc"):
            assert name in binary.text
        assert_spills_little(binary, "forward")
        assert binary.shared <= SHARED_MEMORY["sm_100"]
        # Over FULL and over PARTIAL tiles, by two partitions; products; scaling.
        assert [bool(loop["MUFU"]) for loop in binary.loops].count(True) == 4
        assert len(binary.loops) == 6


@SLOW
@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.exhaustive), 128])
def test_blackwells_backward_uses_tensor_memory_and_warps_of_different_tasks(D: int) -> None:
    for each, products in zip(launched(D, Causal(), 4096, arch="sm_100")[1:], (3, 4), strict=True):
        assert build(each.recipe).threads == 384, "two partitions of four warps, and two of one, padded to four"
        for ptxas in ASSEMBLERS:
            binary = compile_for(each, "sm_100", ptxas)
            for name in ("tcgen05.mma", "tcgen05.alloc", "cp.async.bulk.tensor", "setmaxnreg.dec", "setmaxnreg.inc"):
                assert name in binary.text
            assert_spills_little(binary, each.recipe.kernel.name)
            assert binary.shared <= SHARED_MEMORY["sm_100"]
            # Over FULL and over PARTIAL tiles, by two partitions; products, in parts of 16 of what is summed over.
            assert [bool(loop["MUFU"]) for loop in binary.loops].count(True) == 4
            assert binary.loops[-1]["UTCHMMA"] == 2 * D // 16 + (products - 2) * 128 // 16


def test_explain_says_why_a_plain_kernel_serves() -> None:
    assert told(128, None, arch="sm_103")[0] == "Blackwell's in Gluon"
    assert told(64, None, 128, arch="sm_100") == ["plain Triton (128 queries are at most 128)"] * 3
    assert told(96, None) == ["plain Triton (the head dim 96 is none of 64, 128, 256)"] * 3
    assert told(64, None, arch="sm_120") == ["plain Triton (sm_120 has no specialised ones)"] * 3
    assert told(256, None)[2] == "plain Triton (no specialised kernel computes them)"
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda"))
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    line, of_derivatives = explain(operation.request(q, q, q), NAME).chosen.details
    assert of_derivatives.endswith("higher orders in plain JAX, as native flash")
    assert line.startswith("kernels: depend on the GPU, and there is none")


@pytest.mark.slow
def test_sm_103_has_the_same_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backend, "device_arch", lambda: "sm_103")
    q = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    with recording() as found:
        jax.eval_shape(both({}), q, q, q, q)
    same = launched(64, None, 512, K=4, arch="sm_100")
    source = tmp_path / "kernel.ptx"
    for own, other in zip(found, same, strict=True):
        assert dataclasses.replace(own.recipe, arch="sm_100") == other.recipe
        assert own.recipe.arch == "sm_103"
        source.write_bytes(build(own.recipe).code)
        for ptxas in ASSEMBLERS:
            command = [str(ptxas), "-v", "-arch=sm_103a", str(source), "-o", str(tmp_path / "kernel.cubin")]
            assert " 0 bytes spill stores" in subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("D", "mask", "T", "options", "expected"),
    [
        (64, None, 256, {}, (256, 128)),
        (128, documents(512), 512, {}, (256, 64)),
        (128, documents(300), 300, {}, (256, 32)),
        (64, Causal(), 256, {"logits_soft_cap": 30.0}, (256, 64)),
        (64, None, 128, {}, None),
        (256, None, 256, {}, None),
        (128, Segments(np.arange(256) // 90, np.arange(256) // 80), 256, {}, None),
        (128, None, 256, {"dtype": "float32"}, None),
        (128, None, 256, {"bias": jnp.ones((1, 4, 256, 256))}, None),
    ],
)
def test_which_calls_blackwells_kernels_serve(
    D: int, mask: Mask | None, T: int, options: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    found = launched(D, mask, T, arch="sm_100", **options)
    assert [("Gluon" in part) for part in told(D, mask, T, arch="sm_100", **options)] == specialised(found)[:3]
    assert specialised(found)[:3] == [expected is not None] * 3
    assert expected in (None, (found[0].tiles.bq, found[0].tiles.bk))
