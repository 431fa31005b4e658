"""The compiler's static schedule, so that no change makes it worse unnoticed; exact and repeatable."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnops_tpu.schedule import UNITS, Block, Region, Regions, Span, in_tiles, measure, read, regions_of, spans_of

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tpu_schedule.py"

# Bundles and spills by 512 × 512 scores, bfloat16, D = 128, nothing masked. NOTES.md has the counts, and splash's:
# 714 and 1,337 on v6e, 687 and 1,216 on tpu7x, with some 700 and 900 spills.
MOST = {
    ("v6e", "forward"): (571, 70),
    ("v6e", "backward"): (1203, 100),
    ("tpu7x", "forward"): (584, 69),
    ("tpu7x", "backward"): (1094, 84),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "name"),
    # The test below compiles a backward pass too.
    [case if case == ("v6e", "forward") else pytest.param(*case, marks=pytest.mark.exhaustive) for case in MOST],
)
def test_bundles_and_spills(generation: str, name: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--generation", generation, "--pass", name, "--only", "attnops-tpu"]
    subprocess.run([*command, "--json", str(figures)], check=True, capture_output=True)
    (row,) = json.loads(figures.read_text())
    bundles, spills = MOST[generation, name]
    assert row["bundles"] <= bundles
    assert row["SPILL"] <= spills


BACKWARD = """
import jax, jax.numpy as jnp
from attnops_tpu.aot import compile_for
from attnops import OperationMetadata, OperationRegistry
flash = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", block_q=1024, block_k=1024))
x = jax.ShapeDtypeStruct((1, 2048, 1, 128), jnp.bfloat16)
compile_for(lambda q, k, v, d: jax.vjp(lambda *qkv: flash(*qkv).attention_outputs, q, k, v)[1](d), (x,) * 4, "v6e")
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_stores_of_the_backward_pass_are_not_forwarded_to_loads() -> None:
    """Buffers are read at an offset of 0 that the compiler does not know; at a known one it spills 1,230 registers."""
    schedule, _ = measure(["-c", BACKWARD], "attnops_flash_backward")
    assert schedule.body.uses["SPILL"] <= 500
    assert schedule.body.bundles <= 4200


@pytest.mark.slow
def test_any_function_of_a_file_is_scheduled(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(
        "import jax\n"
        "from jax.experimental import pallas as pl\n\n\n"
        "def kernel(x, out):\n    out[...] = x[...] * 2 + x[...] @ x[...]\n\n\n"
        "def double(x):\n    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)\n"
    )
    command = [sys.executable, str(SCRIPT), "--generation", "v5e", "--function", "doubling:double"]
    figures = tmp_path / "figures.json"
    command += ["--argument", "float32[256,256]", "--tiles", "2", "--json", str(figures)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (row, *_) = json.loads(figures.read_text())
    assert row["generation"] == "v5e"
    assert row["bundles"] > 0
    assert row["MATMUL"] > 0


def kernel(*lines: tuple[str, str, bool]) -> Regions:
    """The regions of a kernel of (loops, what a bundle does, whether it stores) bundles."""
    table = [[int(stores) if unit == "VSTORE" else 1 for unit in UNITS] for *_, stores in lines]
    return regions_of([f"  0x{i:x}   : {loops} {{ {text} }}" for i, (loops, text, _) in enumerate(lines)], table)


def test_a_whole_kernel_is_its_regions_times_their_trips() -> None:
    delay = [(">", "slot", False)] * 4
    regions = kernel(
        *[("", "prologue", False)] * 7,
        (">", "sbr.rel (%p0) target = $region9", False), *delay,  # around the whole step
        *[(">", "index", False)] * 3,
        (">", "sbr.rel (%p1) target = $region2", False), *delay,
        *[(">", "vst", True)] * 60,
        (">", "vmul } /* Start/End empty region 2 :: Start region 3 */", False),
        (">", "sbr.rel (%p2) target = $region4 ;; nop", False), *delay,
        *[(">>", "vst", True)] * 8,
        (">", "nop } /* Start region 4 */", False),
        (">", "sbr.rel (%p3) target = $region5", False), *delay,
        *[(">", "dma", False)] * 70,  # stores nothing
        (">", "nop } /* Start region 5 */", False),
        (">", "nop } /* Start region 9 */", False),
        (">", "sbr.rel (!%p4) target = $region1", False),
    )  # fmt: skip
    assert [(r.bundles, r.loops) for r in regions.skipped] == [(60, ()), (0, (8,))]
    assert (regions.once, regions.step) == (7, 5 + 3 + 5 + 1 + 5 + 1 + 5 + 70 + 1 + 1 + 1)
    total = regions.total(10, [("body", 3, 0), ("clear", 2, 16)])
    assert total == {"once": 7, "steps": 10 * regions.step, "body": 180, "clear": 2 * 16 * 8}
    with pytest.raises(LookupError, match=r"2 regions, of \[60, 0\] bundles, but 1 are expected: \['body'\]"):
        regions.total(10, [("body", 3, 0)])


def test_branches_have_the_lines_that_make_them() -> None:
    texts = [
        "%1 = sbr.rel (%p0) /* loc(\"/a/item.py\":7:5 to :23) */ target = $region1 "
        ";; vld /* loc(\"/a/b.py\":9:1 to :2) */",
        "vst /* loc(\"/a/b.py\":9:1 to :2) */ ;; sbr.rel (%p1) target = $region2", "nop } /* Start region 2 */",
        "nop } /* Start region 1 */",
    ]  # fmt: skip
    found = spans_of([f"  0x{i:x}   : > {{ {text} }}" for i, text in enumerate(texts)])
    assert found == (Span(0, 3, 1, "item.py:7"), Span(1, 2, 1, ""))


def contenders() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return importlib.import_module("tpu_contenders")


def test_trips_are_those_of_the_tile_schedules() -> None:
    whole = contenders()
    job = whole.KernelJob("v6e", "attnops-tpu", False, "causal", 8192, 128)
    ((steps, padding, trips),) = whole.own_trips(job)
    # A core that is alone begins and drains once for all heads; a row's first tile follows the diagonal one before, and
    # a head's first tile the last one of the head before.
    assert (steps, padding, [(name, runs) for name, runs, _ in trips]) == (
        11, 0,
        [("FULL after FULL", 3), ("FULL after REDUCED", 3), ("REDUCED after FULL", 3), ("REDUCED after REDUCED", 1),
         ("drain", 1 / 8), ("empty rows", 0), ("init", 1 / 8), ("finish", 4)],
    )  # fmt: skip
    ((steps, padding, trips),) = whole.own_trips(job._replace(backward=True))
    assert (steps, padding, [(name, runs) for name, runs, _ in trips]) == (
        10, 0, [("clear dq", 1), ("clear dk, dv", 0), ("FULL", 6), ("REDUCED", 4), ("write", 4),
                ("write dq", 1)]
    )  # fmt: skip
    assert whole.counts("window", 4096, 1024, 1024, False) == whole.TileCounts(active=7, full=0, rows=4, widest=2)
    changed = Regions(0, 0, (Region(60, (), dict.fromkeys(UNITS, 1)),) * 5)
    peer = whole.KernelJob("v6e", "splash", False, "causal", 4096, 128, (1024, 1024, 512))
    with pytest.raises(LookupError, match="splash has 5 bodies"):
        whole.peer_trips(peer, changed)
    # With one tile a row, every step clears and writes.
    one = Regions(0, 0, (Region(60, (), dict.fromkeys(UNITS, 1)),))
    assert whole.peer_trips(peer._replace(mask="documents"), one) == (4, 0.0, [("tiles", 4.0, 0.0)])


def test_blocks_that_a_kernel_copies_are_no_part_of_its_tiles() -> None:
    uses = dict.fromkeys(UNITS, 0) | {"VLOAD": 113, "VSTORE": 128}
    copy, tile = Region(76, (), uses), Region(200, (), uses | {"MATMUL": 1})
    assert [region.is_copy for region in (copy, tile, Region(60, (), uses | {"VLOAD": 0}))] == [True, False, False]
    trips = contenders()._with_copies(Regions(0, 0, (copy, tile, copy, tile)), 10.0, 3.0, [("tile", 9.0, 0.0)] * 2)
    assert trips == [("copies", 10.0, 0.0), ("tile", 9.0, 0.0), ("copies", 10.0, 0.0), ("tile", 9.0, 0.0)]
    trips = contenders()._with_copies(Regions(0, 0, (tile, copy)), 10.0, 3.0, [("tile", 9.0, 0.0)])
    assert trips == [("tile", 9.0, 0.0), ("copies", 3.0, 0.0)]


def test_reads_what_the_compiler_writes(tmp_path: Path) -> None:
    bundles = ["  0x1 : { vadd }"] * 120 + ["  0x2 : { sbr.rel target }"] + ["  0x3 : { vmul }"] * 150
    table = ["a header", "", " ".join("4" for _ in UNITS), ""]
    table += [" ".join("1" for _ in UNITS)] * 121 + [" ".join("2" for _ in UNITS)] * 150
    (tmp_path / "17-my_kernel-72-final_bundles.txt").write_text("\n".join(bundles))
    (tmp_path / "17-my_kernel-73-final_hlo-static-per-bundle-utilization.txt").write_text("\n".join(table))
    schedule = read(str(tmp_path), "my_kernel")
    assert [block.bundles for block in schedule.blocks] == [121, 150]
    assert (schedule.kernel, schedule.bundles, schedule.capacity["VALU"]) == ("my_kernel", 271, 4)
    assert schedule.body == Block(150, dict.fromkeys(UNITS, 300))
    assert in_tiles(schedule.body, 4)["bundles"] == 37.5
    with pytest.raises(LookupError, match="no kernel named like 'other'"):
        read(str(tmp_path), "other")
