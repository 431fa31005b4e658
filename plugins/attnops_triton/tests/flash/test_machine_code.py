"""What runs together in the machine code of specialised kernels, by each assembler: what assemblers or Triton undo."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from machine_code import Loop, Statement, changed, exactly, loops_of_amd, lost
from specialised_kernels import launched
from triton_assemblers import ASSEMBLERS

from attnops.masks import Causal, Mask
from attnops_triton.aot import compile_for
from attnops_triton.flash.order import unordered

MASKS = {"none": None, "causal": Causal()}
# Triton's own assembler, and those that jaxlib may use.
EVERY = (None, *ASSEMBLERS)


def computing(count: int, parts: int, *statements: Statement) -> Loop:
    """Loops over tiles by Hopper's partitions that compute. Parts end at waits for products."""
    return Loop("HGMMA", "", count, "WAIT", parts, statements)


def loading(count: int, copies: int) -> Loop:
    """Loops of the loader."""
    return Loop("UTMALDG", "", count, "UTMASTG", 1, (exactly("copies of a tile", 0, "UTMALDG", copies),))


def hopper(name: str, D: int, columns: int, loops: int) -> tuple[Loop, ...]:
    """The loops of Hopper's kernel ``name``: tiles of ``columns`` streamed tokens, and ``loops`` kinds of tiles."""
    scores, sums, weights = D // 16, columns // 16, columns // 2
    copies = 2 * D // 64
    together = "the products for scores and for gradients of weights are in flight together"
    if name == "forward":
        return (
            computing(
                2 * loops, 3,
                exactly("scores and the last tile's sums are in flight together", 0, "HGMMA", scores + sums),
                Statement("maxima are found while sums are multiplied", 1, "FMNMX", weights, weights + 16),
                Statement("exponentials run while sums are multiplied", 1, "MUFU", weights, weights + 2),
                exactly("sums are scaled after they were multiplied", 2, "HGMMA", 0),
            ),
            loading(loops, copies),
        )  # fmt: skip
    if name == "backward_query":
        return (
            computing(
                2 * loops, 4,
                exactly(together, 0, "HGMMA", 2 * scores),
                exactly("exponentials run while gradients of weights are multiplied", 1, "MUFU", weights),
                exactly("dq follows both", 2, "HGMMA", sums),
            ),
            loading(loops, copies),
        )  # fmt: skip
    adds_dq, during_dv = name == "backward", "gradients of scores are computed while dv is multiplied"
    return (
        computing(
            2 * loops, 6 if adds_dq else 5,
            exactly(together, 0, "HGMMA", 2 * scores),
            exactly("exponentials run while gradients of weights are multiplied", 1, "MUFU", weights),
            exactly("dv follows the weights", 1, "HGMMA", sums),
            Statement(during_dv, 2, "FMUL", 7 * weights // 8, weights + 4),
            exactly("dk, and dq, follow the gradients of scores", 3, "HGMMA", sums + 8 * adds_dq),
        ),
        loading(loops, copies + 1),
    )  # fmt: skip


def compiled(name: str, D: int, mask: Mask | None, arch: str = "sm_90") -> Any:
    """The kernel ``name``."""
    with unordered() if name == "backward" else contextlib.nullcontext():
        found = launched(D, mask, 65536 if name == "backward" else 4096, arch=arch)
    return next(x for x in found if x.recipe.kernel.name == f"attnops_flash_{name}")


def losses(each: Any, expected: tuple[Loop, ...], arch: str = "sm_90") -> list[list[str]]:
    """What each assembler loses."""
    return [lost(compile_for(each, arch, ptxas).code, expected) for ptxas in EVERY]


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "D"),
    [("forward", 64), ("forward", 128), ("forward", 256), ("backward_query", 64), ("backward_query", 128),
     ("backward_query", 256), ("backward_key", 64), ("backward_key", 128), ("backward", 64), ("backward", 128)],
)  # fmt: skip
@pytest.mark.tier(every=3)
def test_hoppers_kernels_overlap(name: str, D: int, mask: str) -> None:
    each = compiled(name, D, MASKS[mask])
    columns = each.tiles.bq if name in ("backward_key", "backward") else each.tiles.bk
    assert losses(each, hopper(name, D, columns, 1 if mask == "none" else 2)) == [[]] * len(EVERY)


# Kernels without what keeps the order: what is replaced, and what is then lost.
NOTHING = "stage = stage"
START = "dp = gl.full(options.shape, 0.0, gl.float32, options.scores_layout) - "
MENDS = {
    "forward": ("keep_order(shared, group)", NOTHING, "exponentials run while sums are multiplied"),
    "backward_query": ("keep_order(shared, group)", NOTHING, "exponentials run while gradients of weights"),
    # The sums of a product may not be written while another is in flight.
    "backward_key": (
        "dp = new_product(v.tile.index(group), cotangents.permute([1, 0]), options)",
        f"{START}statistics.slice(1, 1, 0).load(options.scores_layout); "
        "dp = warpgroup_mma(v.tile.index(group), cotangents.permute([1, 0]), dp, is_async=True)",
        "has 5 WAIT, not 4",
    ),
    "backward": ("keep_order(shared, group)", NOTHING, "gradients of scores are computed while dv is multiplied"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDS)
def test_without_its_mend_a_kernel_of_hoppers_loses_it(name: str, tmp_path: Path) -> None:
    D = 64 if name == "backward" else 128
    each = compiled(name, D, None)
    columns = each.tiles.bq if name in ("backward_key", "backward") else each.tiles.bk
    *pair, words = MENDS[name]
    for found in losses(changed(each, tmp_path, *pair), hopper(name, D, columns, 1)):
        assert any(words in x for x in found), found


def blackwell(name: str, D: int, loops: int) -> tuple[Loop, ...]:
    """The loops of Blackwell's kernel ``name``, whose tiles have 128 streamed tokens."""
    by_d, by_tokens, copies = D // 16, 128 // 16, 2 * D // 64
    # At D 64, forward and by query, a quarter of the exponentials are polynomials, which multiply pairs.
    by_units = 96 if D == 64 and name != "backward_key" else 128
    pairs = (128 - by_units) // 2
    if name == "forward":
        both = "a tile's sums and the next scores are issued as soon as its weights are ready"
        return (
            Loop("MUFU", "", 2 * loops, "ARRIVE", 3, (
                Statement("factors are ready before exponentials", 0, "MUFU", 1, 8),
                Statement("maxima are found before factors are ready", 0, "FMNMX", 64, 144),
                Statement("exponentials follow the factors", 1, "MUFU", by_units - 7, by_units),
                Statement("a quarter of the exponentials are polynomials", 1, "FFMA2", 3 * pairs, 5 * pairs),
                exactly("scores are read once, before", 1, "LDTM", 0),
                exactly("weights are written before the last barrier", 1, "STTM", 1),
            )),
            Loop("UTCHMMA", "", 1, "TRYWAIT", 5, tuple(
                exactly(both, part, "UTCHMMA", by_tokens + by_d) for part in (3, 4)
            )),
            Loop("STTM", "MUFU", 1, "ARRIVE", 3, tuple(
                exactly("all sums are scaled before the barrier", part, instruction, D // 16)
                for part in (0, 1) for instruction in ("LDTM", "STTM")
            )),
            loading(loops, copies),
        )  # fmt: skip
    by_key = name == "backward_key"
    early = "weights are written before gradients of weights are read" if by_key else "nothing is written before"
    halves = (("weights", 5), ("weights", 6)) if by_key else ()
    return (
        Loop("MUFU", "", 2 * loops, "LDTM", 3, (
            exactly("exponentials run before gradients of weights are read", 1, "MUFU", by_units // 2),
            exactly(early, 1, "STTM", int(by_key)),
            exactly("gradients of scores are written", 2, "STTM", 1),
        )),
        Loop("UTCHMMA", "", 1, "TRYWAIT", 7 if by_key else 5, (
            exactly("scores are issued first", 1, "UTCHMMA", by_d),
            exactly("a half of gradients of scores", 2, "UTCHMMA", by_tokens // 2),
            exactly("the other half", 3, "UTCHMMA", by_tokens // 2),
            exactly("gradients of weights follow", 4, "UTCHMMA", by_d),
            *(exactly(f"a half of {words}", part, "UTCHMMA", by_tokens // 2) for words, part in halves),
        )),
        loading(loops, copies + by_key),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", ["forward", "backward_query", "backward_key"])
@pytest.mark.tier(every=3)
def test_blackwells_kernels_overlap(name: str, D: int, mask: str) -> None:
    each = compiled(name, D, MASKS[mask], "sm_100")
    assert losses(each, blackwell(name, D, 1 if mask == "none" else 2), "sm_100") == [[]] * len(EVERY)


SCORES = "    mbarrier.wait(own.s_ready.index(group), phase)\n"
DP = "    dp = half_of(own.dp, 0, group, options)\n"
P = "    p = exp2(exponents(scores.s, m, log2_sum, options), options)\n"
DP_READY = "    mbarrier.wait(own.dp_ready.index(0), done & 1)\n"
# Blackwell's kernels in another order: what is replaced, and what is then lost.
ORDERS = {
    "forward": ((f"{SCORES}    p = exp2(", "    p = exp2("), "factors are ready before exponentials"),
    "backward_query": (
        (P + DP_READY + DP, DP_READY + DP + P), "exponentials run before gradients of weights are read"
    ),
    "backward_key": (
        ("    if done > 0:\n        multiply_gradients(shared, state, options)\n    other = shared.rings[1]\n",
         "    other = shared.rings[1]\n",
         "    before = stage\n    stage, phase = advance(stage, phase, options)\n    return Products",
         "    if done > 0:\n        multiply_gradients(shared, state, options)\n"
         "    before = stage\n    stage, phase = advance(stage, phase, options)\n    return Products"),
        "a half of gradients of scores",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_in_another_order_a_kernel_of_blackwells_loses_it(name: str, tmp_path: Path) -> None:
    each = compiled(name, 128, None, "sm_100")
    pairs, words = ORDERS[name]
    for found in losses(changed(each, tmp_path, *pairs), blackwell(name, 128, 1), "sm_100"):
        assert any(words in x for x in found), found


def sm_80(stages: int, arrays: int) -> tuple[Loop, ...]:
    """The loop over tiles of a kernel for sm_80 whose loops load ``arrays`` arrays: the wait for copies leaves those of
    a tile in flight.
    """
    left = arrays * (stages - 2)
    return (
        Loop("HMMA", "", 1, "DEPBAR", 2, (
            exactly("copies of a tile are in flight while another is multiplied", 0, f"DEPBAR{left}", 1),
            exactly("each array's copies are waited for apart", 1, "LDGDEPBAR", arrays),
        )),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("name", "arrays"), [("forward", 2), ("backward_query", 2), ("backward_key", 5)])
def test_copies_are_in_flight_on_sm_80(name: str, arrays: int, D: int) -> None:
    """Not in the kernel by keys at D 128, which has one buffer: with two it spills."""
    each = compiled(name, D, None, "sm_80")
    stages = 2 if (name, D) == ("backward_key", 128) else 3
    assert each.tiles.stages == stages
    for ptxas in ASSEMBLERS:
        code = compile_for(each, "sm_80", ptxas).code
        assert lost(code, sm_80(stages, arrays)) == []
        assert "copies of a tile are in flight" in lost(code, sm_80(5 - stages, arrays))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("forward", 32), ("backward_query", 32)])
def test_keys_are_loaded_while_scores_are_multiplied_on_gfx942(name: str, least: int) -> None:
    """The loop over tiles starts with loads of the next tile, and waits for none of them before its scores."""
    (loop,) = loops_of_amd(compile_for(compiled(name, 128, None, "gfx942"), "gfx942").code)
    first = next(i for i, x in enumerate(loop) if x.startswith("s_waitcnt vmcnt"))
    before = loop[:first]
    load = next(i for i, x in enumerate(before) if x.startswith("global_load"))
    products = sum(x.startswith("v_mfma") for x in before[load:])
    assert least <= products <= 64, f"{products} products while keys are loaded, not {least} to 64"
