"""Kernels become machine code for every architecture, by the real compilers, with no GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_assemblers import ASSEMBLERS

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal, Dense, MaskFn
from attnops.softmax import Contribution
from attnops_testing.catalogue import CASES as ALL
from attnops_testing.catalogue import CompileCase, one_target_each
from attnops_triton.aot import Binary, compile_for, kernels
from attnops_triton.flash import tile_sizes
from attnops_triton.language.build import build
from attnops_triton.language.launch import Launched
from attnops_triton.targets import SHARED_MEMORY, target

SEEN = np.random.default_rng(0).random((4, 97)) > 0.5


def scattered() -> MaskFn:
    """A mask that has no form in Triton, and comes as bits."""
    return MaskFn(lambda b, h, q, kv: jnp.asarray(SEEN)[h % 4, (q * 31 + kv) % 97])


BIAS = (jax.ShapeDtypeStruct((1, 8, 2048, 2048), jnp.float32),)
MASK = (jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bool_),)
# In addition to the catalogue: the cases that need most shared memory.
CASES = ALL | {f"bits, D {D}": CompileCase(D=D, mask=scattered) for D in (64, 128, 256)} | {
    "bits and bias": CompileCase(mask=lambda: Causal() & scattered(), bias=jnp.asarray, learnt=BIAS),
    "dense mask and bias": CompileCase(mask=Dense, traced=MASK, bias=jnp.asarray, learnt=BIAS),
    "dense mask and bias, D 256": CompileCase(D=256, mask=Dense, traced=MASK, bias=jnp.asarray, learnt=BIAS),
}  # fmt: skip
# Each variant of the table: D and Dv, dtype. Those of a head dim that differ in dtype alone take turns.
VARIANTS = [
    *((D, D, dtype) for D in (64, 80, 96, 128, 256) for dtype in ("bfloat16", "float16")),
    (192, 128, "bfloat16"), (576, 512, "bfloat16"), (64, 64, "float32"), (128, 128, "float32"), (256, 256, "float32"),
    (576, 512, "float32"),
]  # fmt: skip
QUICK = {((64, 64, "bfloat16"), "gfx942"), ((128, 128, "bfloat16"), "sm_90")}


def marks_of(variant: tuple[int, int, str], arch: str) -> list[pytest.MarkDecorator]:
    """The slow tests compile a row of most architectures and all of sm_90, the exhaustive ones all."""
    if (variant, arch) in QUICK:
        return []
    in_row = variant[0] not in (80, 96) and (variant[2] == "bfloat16" or variant[0] == 64)
    if arch == "sm_100":
        in_row &= variant[0] in (128, 256)
    elif arch != "sm_90":
        # The code of sm_89 is that of sm_86, and gfx942 has a quick row.
        in_row = variant == (128, 128, "bfloat16") and arch not in ("sm_89", "gfx942")
    return [pytest.mark.slow] if in_row else [pytest.mark.slow, pytest.mark.exhaustive]


SLOW = one_target_each(SHARED_MEMORY) | {"bits, D 128": "sm_90", "dense mask and bias": "sm_80"}


def marks(name: str, arch: str) -> list[pytest.MarkDecorator]:
    """The slow tests compile each distinct case for one architecture, the exhaustive ones all for all."""
    return [pytest.mark.slow] if SLOW.get(name) == arch else [pytest.mark.slow, pytest.mark.exhaustive]


# Float32 with a head dim of 576 is refused where shared memory does not hold it.
REFUSED = {((576, 512, "float32"), arch) for arch in ("sm_86", "sm_89", "sm_120")}


def compiled(case: CompileCase, arch: str, assemblers: tuple[Path, ...] = ASSEMBLERS) -> list[tuple[Launched, Binary]]:
    """The kernels of a case, by each assembler."""
    return [
        (x, compile_for(x, arch, ptxas))
        for x in kernels(case.program("attnops-triton:flash", "cuda"), case.example, arch)
        for ptxas in (assemblers if arch.startswith("sm_") else (None,))
    ]


@pytest.mark.parametrize(
    ("D", "Dv", "dtype", "arch"),
    [
        pytest.param(*variant, arch, marks=marks_of(variant, arch))
        for i, arch in enumerate(SHARED_MEMORY)
        for j, variant in enumerate(VARIANTS)
        if (variant, arch) not in REFUSED
        if pytest.mark.exhaustive not in marks_of(variant, arch) or (i + j) % 2 == 0
    ],
)
@pytest.mark.tier(every=7, quick=["64-64-bfloat16-gfx942"])
def test_variants_of_the_table_fit_and_use_tensor_cores(D: int, Dv: int, dtype: str, arch: str) -> None:
    assemblers = ASSEMBLERS[: 1 if ((D, Dv, dtype), arch) in QUICK else 2]
    binaries = compiled(CompileCase(D=D, Dv=Dv, dtype=jnp.dtype(dtype), mask=Causal), arch, assemblers)
    assert list(dict.fromkeys(x.recipe.kernel.name for x, _ in binaries)) == [
        "attnops_flash_forward", "attnops_flash_backward_query", "attnops_flash_backward_key"
    ]  # fmt: skip
    for launched, binary in binaries:
        what = f"{launched.recipe.kernel.name} with {launched.tiles}"
        assert binary.shared <= SHARED_MEMORY[arch], f"{what} needs {binary.shared} bytes of shared memory"
        if launched.tiles.specialised and arch == "sm_90":
            assert build(launched.recipe).threads == 384, "two partitions of four warps, and one that is padded to four"
            for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.dec", "setmaxnreg.inc"):
                assert name in binary.text, f"{what} does without {name}"
            assert len(binary.loops) == 4, "over FULL and over PARTIAL tiles, in each partition that computes"
        if max(D, Dv) <= 128 and dtype != "float32":
            assert binary.spilled == 0, f"{what} spills {binary.spilled}"
        if dtype != "float32":
            if arch == "sm_90" and max(D, Dv) <= 192:
                assert binary.count("HGMMA"), f"{what} does without wgmma"
            elif arch.startswith("sm_"):
                assert binary.count("HMMA", "HGMMA", "UTCHMMA"), f"{what} does without tensor cores"
            else:
                assert any("mfma" in name for name in binary.instructions), f"{what} does without matrix cores"


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=marks(name, arch))
        for (i, arch), (j, name) in itertools.product(enumerate(SHARED_MEMORY), enumerate(CASES))
        if SLOW.get(name) == arch or (i + j) % 8 == 0  # each for one architecture
    ],
)
@pytest.mark.tier(every=11)
def test_a_case_compiles_within_shared_memory(name: str, arch: str) -> None:
    for launched, binary in compiled(CASES[name], arch):
        assert binary.shared <= SHARED_MEMORY[arch], (
            f"{launched.recipe.kernel.name} needs {binary.shared} bytes of shared memory"
        )


PLAIN = {"none": CompileCase(), "causal": CompileCase(mask=Causal), "dense": CompileCase(mask=Dense, traced=MASK)}
# One of each kind of architecture.
KINDS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
# Two registers, see NOTES.md.
SPILLING = ("gfx942", 128, "dense", 8)
IN_SLOW = {("sm_80", 128, "bfloat16", "dense", 1, 8), ("sm_90", 128, "bfloat16", "none", 8, 2)}


def partial_softmax(case: CompileCase) -> Callable[..., Any]:
    """A function of a case's arguments: a partial softmax, and the gradients of what it contributes to one."""
    operation: Any = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )

    def run(arguments: dict[str, Any], traced: tuple[Any, ...]) -> Any:
        q, k, v = arguments["qkv"]
        mask = case.mask(*traced) if case.mask else None
        rows = jnp.zeros((case.B, case.H, case.T), jnp.float32)
        d = Contribution(jnp.zeros((case.B, case.T, case.H, case.D), jnp.float32), rows)
        return operation.partial(q, k, v, mask=mask), operation.partial_vjp(q, k, v, rows, rows, d, mask=mask)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "D", "dtype", "mask", "B", "K"),
    [
        pytest.param(*x, marks=[] if x in IN_SLOW else [pytest.mark.exhaustive])
        for i, x in enumerate(itertools.product(KINDS, (64, 128), ("bfloat16", "float16"), PLAIN, (1, 8), (8, 2)))
        if x[4:] != (8, 8) and (x[0], x[1], x[3], x[4]) != SPILLING
        if x in IN_SLOW or i % 7 == 0  # seven divides no dimension of the product
    ],
)
@pytest.mark.tier(every=2)
def test_kernels_of_all_architectures_spill_nothing(
    arch: str, D: int, dtype: str, mask: str, B: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many query heads as kv heads, with groups that are split, and with others; partial softmaxes too."""
    monkeypatch.setattr(tile_sizes, "SPECIALISED", {})
    case = dataclasses.replace(PLAIN[mask], D=D, dtype=jnp.dtype(dtype), B=B, K=K)
    programs = case.program("attnops-triton:flash", "cuda"), partial_softmax(case)
    # float16 has float32 gradients in any case.
    for program in programs if dtype == "bfloat16" else programs[:1]:
        for launched in kernels(program, case.example, arch):
            for ptxas in ASSEMBLERS if arch.startswith("sm_") else (None,):
                binary = compile_for(launched, arch, ptxas)
                what = f"{launched.recipe.kernel.name} with {launched.tiles}"
                assert binary.spilled == 0, f"{what} spills {binary.spilled}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("D", "T"), [(64, 1000), (128, 192)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_lengths_that_tiles_do_not_divide_spill_nothing(arch: str, D: int, T: int) -> None:
    for launched, binary in compiled(CompileCase(T=T, D=D, mask=Causal), arch):
        assert binary.spilled == 0, f"{launched.recipe.kernel.name} with {launched.tiles} spills {binary.spilled}"


@pytest.mark.parametrize(("variant", "arch"), sorted(REFUSED))
def test_what_shared_memory_does_not_hold_is_refused(variant: tuple[int, int, str], arch: str) -> None:
    D, Dv, dtype = variant
    q, v = (jax.ShapeDtypeStruct((1, 64, 1, d), jnp.dtype(dtype)) for d in (D, Dv))
    operation: Any = OperationRegistry.create("flash", OperationMetadata(platform="cuda", on_unsupported="error"))

    def run(q: Any, k: Any, v: Any) -> Any:
        return operation(q, k, v).attention_outputs

    with target(arch), pytest.raises(UnsupportedError, match=r"head_dim=576: the smallest tiles .* 139264 bytes"):
        jax.eval_shape(run, q, q, v)
    with target("sm_90"):
        jax.eval_shape(run, q, q, v)


def test_an_architecture_is_part_of_what_is_cached() -> None:
    case = CompileCase(T=256, H=2, K=2, mask=Causal)
    program = jax.jit(case.program("attnops-triton:flash", "cuda"))
    seen = [kernels(program, case.example, arch) for arch in ("sm_80", "sm_90", "sm_80")]
    assert [x[0].plan.arch for x in seen] == ["sm_80", "sm_90", "sm_80"]


@pytest.mark.slow
def test_kernels_compile_after_jax_triton_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which its import does
    case = CompileCase(T=64, H=1, K=1, D=16)
    (launched, *_) = kernels(case.program("attnops-triton:flash", "cuda"), case.example, "sm_80")
    assert compile_for(launched, "sm_80").shared >= 0
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    (launched, *_) = kernels(CASES["plain"].program("attnops-triton:flash", "cuda"), CASES["plain"].example, "sm_90")
    with pytest.raises(ValueError, match=r"sm_12.*use one of"):
        compile_for(launched, "sm_12")


@pytest.mark.slow
def test_kernels_are_the_same_text_in_every_process() -> None:
    case = CASES["causal"]
    texts = [
        [x.recipe.kernel.text for x in kernels(case.program("attnops-triton:flash", "cuda"), case.example, "sm_90")]
        for _ in range(2)
    ]
    jax.clear_caches()
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_large_tiles_have_fewer_stages_or_are_refused() -> None:
    """A program of sm_90 has 232,448 bytes of shared memory; with two stages the forward pass would need 344,064."""
    fields = OperationMetadata(platform="cuda", on_unsupported="error", block_q=128, block_k=128)
    operation: Any = OperationRegistry.create("attnops-triton:flash", fields)
    x = jax.ShapeDtypeStruct((1, 320, 2, 256), jnp.bfloat16)
    mask = Causal() & Dense(np.ones((1, 1, 320, 320), bool))

    def both(*qkv: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *x: operation(*x, mask=mask).attention_outputs, *qkv)
        return pull_back(out)

    forward, by_query, _ = kernels(both, (x, x, x), "sm_90")
    assert build(forward.recipe).shared == 131072
    # gfx950 has the tiles of gfx942, but 2.5 times its shared memory.
    half = (jax.ShapeDtypeStruct((1, 320, 2, 128), jnp.bfloat16),) * 3
    (of_amd,) = kernels(lambda *x: operation(*x, mask=Causal()).attention_outputs, half, "gfx950")
    assert build(of_amd.recipe).shared == 135104
    with pytest.raises(
        ValueError, match=r"needs 262,144 bytes of shared memory, of which a program has 232,448: state"
    ):
        build(by_query.recipe)
