"""Kernels whose warps have different tasks: simulated, and compiled for Hopper and Blackwell."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attnops_triton import versions
from attnops_triton.aot import compile_for, kernels
from attnops_triton.flash import backend, plan
from attnops_triton.flash.hopper.partitions import Partitions
from attnops_triton.flash.order import unordered
from attnops_triton.flash.tile_sizes import SPECIALISED
from attnops_triton.language import assembler, interpreter, simulator
from attnops_triton.language.assembler import Assembler
from attnops_triton.language.build import build
from attnops_triton.language.launch import Launched, recording
from attnops_triton.language.source import Kernel
from attnops_triton.targets import SHARED_MEMORY, target
from triton_assemblers import ASSEMBLERS

from attnops import OperationMetadata, OperationRegistry, explain
from attnops.masks import Causal, Dense, Mask, Segments, SlidingWindow
from attnops.testing import attention, attention_gradients

NAME = "attnops-triton:flash"


def documents(n: int) -> Mask:
    return Causal() & Segments(np.arange(n) // 90)


def names_of_simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the names of kernels that are simulated from now on."""
    names: list[str] = []
    real = simulator.simulate

    def recorded(kernel: Kernel, *given: Any) -> None:
        names.append(kernel.name)
        real(kernel, *given)

    monkeypatch.setattr(simulator, "simulate", recorded)
    return names


def both(options: dict[str, Any], **metadata: Any) -> Callable[..., Any]:
    """The output and the gradients of query, key and value."""
    fields = OperationMetadata(platform="cuda", on_unsupported="error", **metadata)
    operation: Any = OperationRegistry.create(NAME, fields)

    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: operation(*qkv, **options).attention_outputs, q, k, v)
        return out, *pull_back(d_out)

    return run


SLOW = pytest.mark.slow
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
    pytest.param((140, 140, 2, 2, 64), {"mask": Causal(), "sinks": np.array([0.5, -1.0], np.float32)}, id="sinks",
                 marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), PROBLEMS)
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


FORWARD = [
    pytest.param((300, 300, 2, 1, 64), {"mask": Causal()}, id="causal, ragged, grouped"),
    pytest.param((512, 768, 1, 1, 128), {}, id="no mask", marks=SLOW),
    pytest.param((700, 700, 2, 1, 64), {"mask": Causal() & SlidingWindow(200, 0)}, id="window", marks=SLOW),
    pytest.param((300, 700, 2, 2, 128), {"mask": Causal()}, id="more keys than queries", marks=SLOW),
    pytest.param((600, 600, 2, 1, 64), {"mask": documents(600), "logits_soft_cap": 3.0}, id="cap, ids", marks=SLOW),
    pytest.param((512, 512, 1, 1, 64), {"mask": documents(512)}, id="documents", marks=SLOW),
    pytest.param((300, 300, 2, 2, 64), {"mask": Causal(), "sinks": np.array([0.5, -1.0], np.float32)}, id="sinks",
                 marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), FORWARD)
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
        found = jax.block_until_ready(operation(q, k, v, return_lse=True, **options))
    assert run
    mask = options.get("mask")
    dense = None if mask is None else np.asarray(mask.dense(2, H, T, S))
    expected = attention(q, k, v, mask=dense, **{name: x for name, x in options.items() if name != "mask"})
    np.testing.assert_allclose(found.attention_outputs, expected.out, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=5e-6)


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
def test_simulated_blackwells_backward_is_right(
    sizes: tuple[int, ...], options: dict[str, Any], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, S, H, K, D = sizes
    options = dict(options)
    monkeypatch.setattr(simulator, "EAGER", eager)
    if not options.pop("split", False):  # else groups are split, since programs are few
        monkeypatch.setattr(plan, "multiprocessors", lambda arch: 1)
    if options.pop("apart", False):
        monkeypatch.setattr(Partitions, "flat", False)
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
    wait = f"mbarrier.wait({name}_ready.index(0), done & 1)\n"
    return wait, wait.rstrip() + f"; own == {half} and pause()\n"


# By kernel.
MISTAKES_OF_BACKWARD = {
    "keys are not waited for": ("query", "mbarrier.wait(k_ready.index(stage), phase)", "pass"),
    "values are not waited for": ("query", "mbarrier.wait(v_ready.index(stage), phase)", "pass"),
    "queries are not waited for": ("query", "mbarrier.wait(held.index(0), 0)", "pass"),
    "scores are not waited for": ("query", "mbarrier.wait(s_ready.index(done % 2), done // 2 & 1)", "pass"),
    "dp is not waited for": ("query", "mbarrier.wait(dp_ready.index(0), done & 1)", "pass"),
    "ds of a half is not waited for": (
        "query", "mbarrier.wait(ds_ready.index(1), (done - 1) & 1)", "pass", *held_up("dp", 1)
    ),
    "ds never comes": ("query", "mbarrier.arrive(ds_ready.index(own))", "pass"),
    "dq is not waited for": ("query", "mbarrier.wait(finished.index(0), 0)", "pass"),
    "products of ds free nothing": ("query", "mbarriers=[k_free.index(before)]", "mbarriers=[]"),
    "buffers are overwritten": ("query", "mbarrier.wait(k_free.index(stage), phase)", "pass"),
    "scores have one buffer": (
        "query", "s_memory.index(done % 2)", "s_memory.index(0)",
        "done // 2 & 1)", "done // 2 & 1); pause()",
    ),
    "the phase of the ring stays": ("query", "phase = phase ^ 1", "pass"),
    "the logsumexp is not waited for": (
        "key", "mbarrier.wait(q_ready.index(stage), phase)\n        lse", "lse",
        "tma.async_load(statistics_map", "pause(); tma.async_load(statistics_map",
    ),
    "weights of a half are not waited for": (
        "key", "mbarrier.wait(w_ready.index(0), done & 1)", "pass", *held_up("s", 0)
    ),
    "weights never come": ("key", "mbarrier.arrive(w_ready.index(own))", "pass"),
    "cotangents are not waited for": ("key", "mbarrier.wait(d_out_ready.index(stage), phase)", "pass"),
    "ds of a half of queries is not waited for": (
        "key", "mbarrier.wait(ds_ready.index(0), (done - 1) & 1)", "pass", *held_up("dp", 0)
    ),
    "products of weights free nothing": ("key", "mbarriers=[d_out_free.index(stage)]", "mbarriers=[]"),
    "queries are overwritten": ("key", "mbarrier.wait(q_free.index(stage), phase)", "pass"),
    "queries are free before ds was multiplied": (
        "key", "mbarriers=[s_ready.index(done % 1)]",
        "mbarriers=[s_ready.index(done % 1), q_free.index(stage), q_free.index(stage)]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [None, *(pytest.param(x, marks=[] if x == "ds of a half is not waited for" else
                          [SLOW, pytest.mark.exhaustive] if i % 2 else SLOW)
             for i, x in enumerate(MISTAKES_OF_BACKWARD))],
)  # fmt: skip
def test_the_simulator_notices_mistakes_with_blackwells_backward(
    mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "PATIENCE", 2.0)
    kernel, *pairs = MISTAKES_OF_BACKWARD[mistake] if mistake is not None else ("",)
    two = [SPECIALISED["sm_100"][64][0], *(dataclasses.replace(SPECIALISED["sm_100"][64][i], stages=2) for i in (1, 2))]
    monkeypatch.setitem(SPECIALISED["sm_100"], 64, dict(enumerate(two)))
    replaced: list[str] = []
    real = simulator.simulate

    def changed(given: Kernel, integers: Any, programs: int, *arrays: Any) -> None:
        if kernel and given.name == f"attnops_flash_backward_{kernel}":
            replaced.append(given.name)
            given = dataclasses.replace(given, text=mistaken(given.text, *pairs))
        # The rows of the first program are the last ones.
        real(given, integers, programs if given.name == "attnops_flash_forward" else 1, *arrays)

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


@pytest.mark.parametrize("D", [pytest.param(16, id="ordinary"), pytest.param(64, id="specialised", marks=SLOW)])
@pytest.mark.parametrize("multiprocessors", [1, 132])
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


def launched(
    D: int, mask: Mask | None, T: int = 256, dtype: str = "bfloat16", K: int = 2, arch: str = "sm_90", **options: Any
) -> Any:
    """The kernels of forward and backward."""
    q, k = (jax.ShapeDtypeStruct((1, T, heads, D), jnp.dtype(dtype)) for heads in (4, K))
    return kernels(both({"mask": mask, **options}, dropout_prob=0.1 * ("dropout_key" in options)), (q, k, k, q), arch)


def mistaken(text: str, *pairs: str) -> str:
    """The text with some parts replaced by others."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return text


MISTAKES = {
    "values are read before they are there": ("mbarrier.wait(v_ready.index(before), phase_before)", "pass"),
    "buffers of keys are never free": ("mbarrier.arrive(k_free.index(stage))", "pass"),
    "buffers of values are never free": ("mbarrier.arrive(v_free.index(before))", "pass"),
    "the turn is never passed on": ("mbarrier.arrive(turn.index(1 - own))", "pass"),
    "buffers are overwritten": ("mbarrier.wait(k_free.index(stage), phase)", "pass"),
    "scores are read before they are computed": ("s = warpgroup_mma_wait(1, deps=[s])", "pass"),
    "a buffer is free before its product is over": (
        "s = warpgroup_mma_wait(1, deps=[s])\n", "mbarrier.arrive(k_free.index(stage))\n"
    ),
    "the phase of the ring stays": ("phase = phase ^ 1", "pass"),
    "fewer bytes are expected": (
        "mbarrier.expect(k_ready.index(stage), 32768)", "mbarrier.expect(k_ready.index(stage), 16)"
    ),
}  # fmt: skip


MISTAKES_OF_BLACKWELL = {
    "the sums are read before they are there": ("mbarrier.wait(done.index(half), 0)", "pass"),
    "scores are read before they are computed": ("mbarrier.wait(s_ready.index(own), phase)", "pass"),
    "scores are multiplied without keys": ("mbarrier.wait(k_ready.index(stage), phase)", "pass"),
    "weights are multiplied without values": ("mbarrier.wait(v_ready.index(before), phase_before)", "pass"),
    "weights are multiplied before they are there": ("mbarrier.wait(w_ready.index(1), phase_of_weights)", "pass"),
    "queries are not waited for": ("mbarrier.wait(held.index(1), 0)", "pass"),
    "sums are scaled before it is known by what": ("mbarrier.wait(alpha_ready.index(half), phase)", "pass"),
    "weights are multiplied before sums are scaled": (
        "        if t > 0:\n", "        mbarrier.arrive(w_ready.index(half))\n            if t > 0:\n"
    ),
    "the last maximum is not waited for": (
        "mbarrier.wait(ml_ready.index(half), 0)", "pass", "m_tile.index(own).store(m)",
        "pause(); m_tile.index(own).store(m)",
    ),
    "weights never come": ("mbarrier.arrive(w_ready.index(own))", "pass"),
    "it is never known by what sums are scaled": ("mbarrier.arrive(alpha_ready.index(own))", "pass"),
    "products of scores tell nobody": ("mbarriers=[s_ready.index(0), k_free.index(stage)]", "mbarriers=[]"),
    "products of values tell nobody": ("mbarriers=[v_free.index(before)]", "mbarriers=[]"),
    "the last products tell nobody": ("mbarriers=[done.index(1)]", "mbarriers=[]"),
    "buffers are overwritten": ("mbarrier.wait(k_free.index(stage), phase)", "pass"),
    "the phase of the ring stays": ("phase = phase ^ 1", "pass"),
}  # fmt: skip
QUICK = (None, "the sums are read before they are there")
NOTICED = [
    *(("sm_90", mistake) for mistake in (None, *MISTAKES)),
    *(
        pytest.param("sm_100", mistake, marks=[] if mistake in QUICK else SLOW)
        for mistake in (None, *MISTAKES_OF_BLACKWELL)
    ),
]


@pytest.mark.parametrize(("arch", "mistake"), NOTICED)
def test_the_simulator_notices_mistakes_with_barriers(
    arch: str, mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "PATIENCE", 2.0)
    T, D = (640, 64) if arch == "sm_90" else (768, 64)
    q = jax.ShapeDtypeStruct((1, T, 1, D), jnp.float32)
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target(arch):
        (found,) = kernels(lambda *qkv: operation(*qkv).attention_outputs, (q, q, q), arch)
    text = found.recipe.kernel.text
    if mistake is not None:
        text = mistaken(text, *(MISTAKES if arch == "sm_90" else MISTAKES_OF_BLACKWELL)[mistake])
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, T, 1, D)).astype(np.float32) for _ in range(3)]
    out = np.full((1, T, 1, D), np.nan, np.float32)
    results = [out, np.zeros((1, 1, T), np.float32), np.zeros((1, 1, T), np.float32), np.zeros(1, np.int8)]

    def wrong() -> bool:
        try:
            kernel = dataclasses.replace(found.recipe.kernel, text=text)
            interpreter.run_on_host(kernel, found.integers, 1, arrays, results)
        except (TimeoutError, RuntimeError, AttributeError, TypeError, ValueError):
            return True
        rows = slice(T - found.tiles.bq, T)  # of the first program
        expected = attention(*arrays).out
        return not np.allclose(out[:, rows], expected[:, rows], atol=1e-5)

    assert wrong() is (mistake is not None)


def test_rows_without_tiles_are_zero() -> None:
    q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float32)
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target("sm_100"):
        (found,) = kernels(lambda *qkv: operation(*qkv).attention_outputs, (q, q, q), "sm_100")
    kernel = found.recipe.kernel
    integers = tuple(0 if name == "count" else x for name, x in zip(kernel.integers, found.integers, strict=True))
    out, m = np.full((1, 256, 1, 64), np.nan, np.float32), np.full((1, 1, 256), np.nan, np.float32)
    results = [out, m, np.zeros((1, 1, 256), np.float32), np.zeros(1, np.int8)]
    interpreter.run_on_host(kernel, integers, 1, [np.ones_like(out)] * 3, results)
    assert not out.any()
    assert (m == -np.inf).all()


MISTAKES_OF_DQ = {
    "ds of the other partition is not waited for": ("mbarrier.wait(ds_ready.index(0), side)", "pass"),
    "dq is added before it is there": ("mbarrier.wait(dq_ready.index(half), side)", "pass"),
    "dq is overwritten": ("mbarrier.wait(dq_free.index(own), side ^ 1)", "pass"),
    "the buffer of dq is never free": ("mbarrier.arrive(dq_free.index(half))", "pass"),
    "the buffer of dq is free before it was read": ("tma.store_wait(0)", "pass"),
    "dq replaces what is there": ("tma.async_atomic_add(dq_map", "tma.async_store(dq_map"),
    "the columns of keys are not waited for": ("mbarrier.wait(columns.index(0), 0)", "pass"),
    "the logsumexp is not waited for": ("mbarrier.wait(q_ready.index(stage), phase)", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, *MISTAKES_OF_DQ])
def test_the_simulator_notices_mistakes_with_dq(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "PATIENCE", 2.0)
    replaced: list[str] = []
    real = simulator.simulate

    def changed(kernel: Kernel, *given: Any) -> None:
        if mistake is not None and kernel.name == "attnops_flash_backward":
            old, new = MISTAKES_OF_DQ[mistake]
            assert old in kernel.text
            replaced.append(old)
            kernel = dataclasses.replace(kernel, text=kernel.text.replace(old, new))
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


def test_scratch_memory_is_the_last_pointer() -> None:
    (forward, *_) = launched(64, None)
    program, kernel = build(forward.recipe), forward.recipe.kernel
    text = program.code.decode()
    assert kernel.pointers[-1] == "scratch_ptr"
    assert f"[{kernel.name}_param_{len(kernel.pointers) - 1}]" in text
    assert f"[{kernel.name}_param_{len(kernel.pointers) + len(kernel.integers)}]" not in text, "that one is null"
    assert ".version 8.3" in text


TABLE = [
    pytest.param(
        arch, D, dtype, T, K, mask, cap, id=f"{arch} {D} {dtype} {T} {K} {name}{' cap' if cap else ''}",
        marks=[pytest.mark.slow, pytest.mark.exhaustive],
    )
    for arch, by_dim in SPECIALISED.items()
    for D in by_dim
    for dtype in ("bfloat16", "float16")
    for T in (4096, 1000)
    for K in (4, 2)
    for name, mask in (("none", None), ("causal", Causal()), ("window", Causal() & SlidingWindow(500, 0)),
                       ("documents", documents(T)))
    for cap in (None, 30.0)
]  # fmt: skip


@pytest.mark.parametrize(("arch", "D", "dtype", "T", "K", "mask", "cap"), TABLE)
def test_they_fit_and_spill_nothing(
    arch: str, D: int, dtype: str, T: int, K: int, mask: Mask | None, cap: float | None
) -> None:
    with unordered():
        adds_dq = arch == "sm_90" and K == 4 and cap is None
        added = launched(D, mask, T, dtype, 4, logits_soft_cap=cap)[1:] if adds_dq else []
    for each in [*launched(D, mask, T, dtype, K, arch, logits_soft_cap=cap), *added]:
        if arch != "sm_90" and not each.tiles.specialised:
            continue
        for ptxas in ASSEMBLERS:
            binary = compile_for(each, arch, ptxas)
            assert binary.shared <= SHARED_MEMORY[arch]
            assert binary.spilled == 0 or not each.tiles.specialised, f"{each.recipe.kernel.name} {each.tiles}"


@pytest.mark.parametrize("D", [pytest.param(64, marks=SLOW), 128])
def test_blackwells_forward_uses_tensor_memory_and_warps_of_different_tasks(D: int) -> None:
    (forward, *_) = launched(D, Causal(), 4096, arch="sm_100")
    assert build(forward.recipe).threads == 512, (
        "three partitions of four warps, and two of one that are padded to four"
    )
    for ptxas in ASSEMBLERS:
        binary = compile_for(forward, "sm_100", ptxas)
        for name in ("tcgen05.mma", "tcgen05.alloc", "cp.async.bulk.tensor", "setmaxnreg.dec", "setmaxnreg.inc"):
            assert name in binary.text
        assert binary.spilled == 0
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
            assert binary.spilled == 0
            assert binary.shared <= SHARED_MEMORY["sm_100"]
            # Over FULL and over PARTIAL tiles, by two partitions; products, in parts of 16 of what is summed over.
            assert [bool(loop["MUFU"]) for loop in binary.loops].count(True) == 4
            assert binary.loops[-1]["UTCHMMA"] == 2 * D // 16 + (products - 2) * 128 // 16


def specialised(found: list[Launched]) -> list[bool]:
    return [each.tiles.specialised for each in found]


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


def told(D: int, mask: Mask | None, T: int = 256, dtype: str = "bfloat16", arch: str = "sm_90", **options: Any) -> Any:
    """What `explain` says of forward, dq, and dk and dv."""
    q = jax.ShapeDtypeStruct((1, T, 4, D), jnp.dtype(dtype))
    metadata = OperationMetadata(platform="cuda", dropout_prob=0.1 * ("dropout_key" in options))
    operation: Any = OperationRegistry.create(NAME, metadata)
    with target(arch):
        (line,) = explain(operation.request(q, q, q, mask=mask, **options), NAME, metadata).chosen.details
    assert line.startswith(f"kernels on {arch}: ")
    by = {name: how for part in line.split(": ", 1)[1].split("; ") for names, how in [part.split(" by ", 1)]
          for name in names.split(", ")}  # fmt: skip
    return [by[name] for name in ("forward", "dq", "dk and dv")]


def test_explain_says_why_a_plain_kernel_serves() -> None:
    assert told(128, None, arch="sm_103")[0] == "Blackwell's in Gluon"
    assert told(64, None, 128, arch="sm_100") == ["plain Triton (128 queries are at most 128)"] * 3
    assert told(96, None) == ["plain Triton (the head dim 96 is none of 64, 128, 256)"] * 3
    assert told(64, None, arch="sm_120") == ["plain Triton (sm_120 has no specialised ones)"] * 3
    assert told(256, None)[2] == "plain Triton (no other for them)"
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda"))
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    (line,) = explain(operation.request(q, q, q), NAME).chosen.details
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


def test_old_versions_and_assemblers_have_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(versions, "version_of", {"triton": "3.8.0", "jax": "0.10.2"}.get)
        assert specialised(launched(64, None)) == [False] * 3

    def here(release: tuple[int, int]) -> bool:
        from attnops_triton.flash import specialised as module

        monkeypatch.setattr(assembler, "find", lambda: Assembler(Path("ptxas"), release))
        return module._is_supported()

    assert [here((12, 2)), here((12, 3))] == [False, True]
