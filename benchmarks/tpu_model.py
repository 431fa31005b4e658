"""Static counts beside times that others measured on TPUs, and the times of attnops-tpu that follow; nothing runs on a
TPU::

    python benchmarks/tpu_model.py --json out.json

Each of `points` is a time that the authors of a kernel publish, for a shape and tiles that are compiled here too. Its
static time is that of the kernel's bundles, at the clock at which the matrix units reach the published peak, and that
of the bytes that the program moves outside of the kernel, at the published bandwidth. Inside, tiles of keys and values
are read while others are computed, and need less time than these. The model has one constant for each generation, the
median of the published times over the static ones; "error" is a published time over that of the model. Lines of
decoding kernels have the time of their bytes, which is longer than that of their bundles, and no constant. The last
table has attnops-tpu's times by the model, and their range by its errors.

A kernel is compiled once for each tile and adds up for every length and mask; results are kept in the file of
``--json``, which may be that of `tpu_kernels.py`. Versions differ: flywheel's tables are of libtpu 0.0.44, tokamax's of
versions that they don't tell. Needs what `tpu_kernels.py` needs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from tpu_contenders import DIAGONAL, HEADS, REDUCTION, SCHEDULER, KernelJob
from tpu_kernels import BYTES_A_CYCLE, PROBLEMS, Results, bundles
from tpu_prefill_peers import Shape, prompt

# GHz at which the matrix units reach the published peak.
CLOCK: Final = {"v6e": 1.75, "tpu7x": 2.2}
OPERATION = "tokamax 0.0.17, data/autotuning, pallas_mosaic_tpu_flash_attention.json"
SPLASH = "tokamax 0.0.17, data/autotuning, pallas_mosaic_tpu_splash_attention.json"
GRADIENT = "tokamax 0.0.17, data/autotuning, pallas_mosaic_tpu_splash_attention_vjp.json"
FLYWHEEL = "flywheel-tpu, README_v7x.md, kernel level"


class Point(NamedTuple):
    """A published time.

    Attributes:
        source: where it is published.
        generation: the TPU.
        name: the kernel's, as of `tpu_contenders.CONTENDERS`.
        mask: causal or full.
        T: tokens.
        heads: query heads of all sequences.
        kv_heads: kv heads of all sequences.
        head_dim: D.
        blocks: tiles.
        option: tokamax's options, and the layouts of queries, keys and values: h if the head dim is in the lanes, s if
            tokens are.
        ms: the time.
        is_whole: whether the time includes the transposition of [B, T, H, D] arrays.
        backward: which pass.
    """

    source: str
    generation: str
    name: str
    mask: str
    T: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[int, ...]
    option: str
    ms: float
    is_whole: bool = False
    backward: bool = False

    @property
    def job(self) -> KernelJob:
        """What is compiled: the same kernel for every length and mask."""
        T = max(4096, 2 * self.blocks[0])
        return KernelJob(
            self.generation, self.name, self.backward, "causal", T, self.head_dim, self.blocks, self.option
        )


def tera(rate: float, T: int, D: int) -> float:
    """The milliseconds of a causal forward pass of 32 heads at so many TFLOP/s, as flywheel counts them."""
    return 2 * T * T * 32 * D / rate / 1e9


def points() -> Iterator[Point]:
    large, small = (2048, 2048, 512), (1024, 1024, 512)
    shh, hsh, hhh = (f"{SCHEDULER} {layout}" for layout in ("shh", "hsh", "hhh"))
    for D, times in (
        (128, (3.981, 2.431, 6.657, 3.553, 2.012, 1.576)),
        (256, (2.333, 1.501, 3.752, 2.097, 1.265, 1.039)),
    ):
        heads = 2048 // D
        cases = (("causal", 16384, large), ("causal", 8192, large), ("full", 16384, large), ("full", 8192, large),
                 ("full", 4096, large), ("causal", 4096, small))  # fmt: skip
        for (mask, T, blocks), ms in zip(cases, times, strict=True):
            n = heads * 16384 // T
            yield Point(OPERATION, "v6e", "tokamax", mask, T, n, n, D, blocks, shh, ms, is_whole=True)
    yield Point(OPERATION, "tpu7x", "tokamax", "causal", 16384, 16, 16, 128, large, hsh, 3.585, is_whole=True)
    yield Point(OPERATION, "tpu7x", "tokamax", "causal", 16384, 8, 8, 256, large, hsh, 2.074, is_whole=True)
    yield Point(OPERATION, "tpu7x", "tokamax", "causal", 8192, 16, 16, 256, large, hsh, 1.29, is_whole=True)
    for T, heads, ms in ((8192, 32, 1.976), (8192, 64, 3.932), (8192, 128, 7.841), (32768, 32, 25.43)):
        yield Point(SPLASH, "tpu7x", "tokamax", "causal", T, heads, 8, 128, large, hsh, ms)
    yield Point(SPLASH, "tpu7x", "tokamax", "causal", 4096, 32, 8, 128, (1024, 1024, 1024), DIAGONAL, 0.586)
    for T, ms in ((8192, 2.233), (32768, 27.813)):
        yield Point(SPLASH, "tpu7x", "tokamax", "causal", T, 32, 8, 256, large, hsh, ms)
    for T, heads, ms in ((8192, 32, 4.132), (8192, 64, 8.261), (8192, 128, 16.474), (32768, 32, 52.954)):
        yield Point(GRADIENT, "tpu7x", "tokamax", "causal", T, heads, 8, 128, large, REDUCTION, ms, backward=True)
    tiles = (1024, 1024, 1024)
    yield Point(GRADIENT, "tpu7x", "tokamax", "causal", 4096, 32, 8, 128, tiles, REDUCTION, 1.254, backward=True)
    for T, rate in ((2048, 590), (4096, 630), (8192, 715), (16384, 759), (32768, 779)):
        blocks = (2048, 2048, 256, 256)
        yield Point(FLYWHEEL, "tpu7x", "flywheel", "causal", T, 32, 32, 256, blocks, "", tera(rate, T, 256))
    for T, rate in ((65536, 794), (131072, 801)):
        blocks = (2048, 2048, 256, 512)
        yield Point(FLYWHEEL, "tpu7x", "flywheel", "causal", T, 32, 32, 256, blocks, "", tera(rate, T, 256))
    for T, rate, option in ((8192, 494, hhh), (16384, 573, hhh), (65536, 663, hsh), (131072, 678, hsh)):
        yield Point(FLYWHEEL, "tpu7x", "tokamax", "causal", T, 32, 32, 256, large, option, tera(rate, T, 256))


class Pages(NamedTuple):
    """A published time of RPA v3 for one prompt over pages.

    Attributes:
        source: where it is published.
        generation: the TPU.
        T: tokens, all of them new.
        shape: the heads and tiles.
        ms: the time.
    """

    source: str
    generation: str
    T: int
    shape: Shape
    ms: float


def prompts() -> Iterator[Pages]:
    for T, rate in ((4096, 177), (8192, 187), (16384, 189)):
        yield Pages(FLYWHEEL, "tpu7x", T, Shape(32, 32, 256, (128, 256, 128, 256)), tera(rate, T, 256))
    for T, rate in ((4096, 416), (16384, 465)):
        yield Pages(FLYWHEEL, "tpu7x", T, Shape(32, 4, 256, (256, 1024, 256, 512)), tera(rate, T, 256))


class Memory(NamedTuple):
    """A published time of a decoding kernel, whose static bundles are fewer than the cycles of its bytes.

    Attributes:
        source: where it is published.
        case: what is decoded, on one core of a tpu7x: D 256, pages of 128, bfloat16.
        rows: sequences.
        kv_heads: K.
        ms: a step's time.
    """

    source: str
    case: str
    rows: int
    kv_heads: int
    ms: float


# 15k tokens are cached before the first of 1,024 steps.
CONTEXT: Final = 15 * 1024 + 512
SERVING: Final = "flywheel-tpu, README_v7x.md, serving"
DECODING: Final = (
    Memory(SERVING, "RPA v3, 32:4, 256 rows", 256, 4, 5.148),
    Memory(SERVING, "flywheel, 32:4, 256 rows", 256, 4, 5.219),
    Memory(SERVING, "RPA v3, 32:4, 128 rows", 128, 4, 2.574),
    Memory(SERVING, "flywheel, 32:4, 128 rows", 128, 4, 2.607),
    Memory(SERVING, "RPA v3, 32:32, 128 rows", 128, 32, 22.426),
    Memory(SERVING, "flywheel, 32:32, 128 rows", 128, 32, 29.324),
)


def static_ms(point: Point, result: dict[str, Any]) -> tuple[float, float]:
    """The milliseconds of a point's kernel and of what its program moves outside of it, arrays larger than VMEM."""
    job = point.job._replace(T=point.T, mask=point.mask)
    kernel = point.heads * sum(bundles(job, result).values())
    q, k, v = (2 * n * point.T * point.head_dim for n in (point.heads, point.kv_heads, point.kv_heads))
    # Arrays are read and written: transposed heads of operands and the output, and operands whose tokens are in the
    # lanes.
    outside = 2 * (2 * q + k + v) if point.is_whole else 0
    layouts = point.option[-3:] if point.option.startswith(SCHEDULER) else "hhh"
    outside += sum(2 * n for n, layout in zip((q, k, v), layouts, strict=True) if layout == "s")
    if point.backward:  # three parts of dq are cleared and added up, dk and dv of a group too, and outputs are read
        outside += q * (3 + 3 + 1 + 2 + 2)
    hertz = CLOCK[point.generation] * 1e6
    return kernel / hertz, outside / BYTES_A_CYCLE[point.generation] / hertz


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keeps each result; a later run continues it.")
    ] = None,
    generation: Annotated[list[str], typer.Option()] = ["v6e", "tpu7x"],  # noqa: B006
    with_prompts: Annotated[
        bool, typer.Option("--prompts", help="RPA v3 over pages too, which is compiled again.")
    ] = False,
) -> None:
    """Compare static counts with published times, and predict attnops-tpu's."""
    results, console = Results(json_file), Console(width=150)
    sources = {source: str(i + 1) for i, source in enumerate((OPERATION, SPLASH, GRADIENT, FLYWHEEL, SERVING))}
    title = "Milliseconds; ratio: published over static; error: published over the model's"
    columns = "TPU", "kernel", "case", "tiles", "static", "outside", "published", "ratio", "error", "source"
    shown = Table(*columns, title=title)
    factors, errors = {}, {}
    for each in generation:
        lines = []
        for point in (x for x in points() if x.generation == each):
            result = results.get(point.job)
            if "error" in result:
                print(f"{point}: {result['error']}", file=sys.stderr)
                continue
            lines.append((point, *static_ms(point, result)))
        factors[each] = factor = statistics.median((point.ms - outside) / kernel for point, kernel, outside in lines)
        errors[each] = [point.ms / (factor * kernel + outside) for point, kernel, outside in lines]
        for (point, kernel, outside), error in zip(lines, errors[each], strict=True):
            one_way = "backward" if point.backward else "forward"
            case = f"{one_way} {point.mask} {point.T >> 10}k, {point.heads} × {point.head_dim}"
            layouts = f" {point.option[-3:]}" if point.option.startswith(SCHEDULER) else ""
            tiles = " × ".join(map(str, point.blocks)) + layouts
            shown.add_row(each, point.name, case, tiles, f"{kernel:.3f}", f"{outside:.3f}", f"{point.ms:.3f}",
                          f"{point.ms / (kernel + outside):.2f}", f"{error:.2f}", sources[point.source])  # fmt: skip
    for page in (x for x in prompts() if with_prompts and x.generation in generation):
        static = prompt("RPA v3", page.generation, page.T, page.T, page.shape, compiled=4096).bundles
        ratio = page.ms / (static / CLOCK[page.generation] / 1e6)
        case = f"forward causal {page.T >> 10}k, {page.shape.heads}:{page.shape.kv_heads} × {page.shape.head_dim}"
        shown.add_row(page.generation, "RPA v3", case, " × ".join(map(str, page.shape.sizes)),
                      f"{static / CLOCK[page.generation] / 1e6:.3f}", "", f"{page.ms:.3f}", f"{ratio:.2f}",
                      f"{ratio / factors[page.generation]:.2f}", sources[page.source])  # fmt: skip
    for line in DECODING if "tpu7x" in generation else ():
        cycles = line.rows * CONTEXT * 2 * line.kv_heads * 256 * 2 / BYTES_A_CYCLE["tpu7x"]
        static = cycles / CLOCK["tpu7x"] / 1e6
        times = f"{static:.3f}", f"{line.ms:.3f}", f"{line.ms / static:.2f}"
        shown.add_row("tpu7x", "", line.case, "", "", *times, "", sources[line.source])
    console.print(shown)
    for source, number in sources.items():
        print(f"{number}: {source}")
    ours = Table("TPU", "problem", "pass", "static ms", "model ms", "range", title="attnops-tpu, 8 heads of 128")
    for each in generation:
        for problem in ("causal 4k",):
            T, mask = PROBLEMS[problem]
            for backward in (False, True):
                job = KernelJob(each, "attnops-tpu", backward, mask, T, 128)
                static = HEADS * sum(bundles(job, results.get(job)).values()) / CLOCK[each] / 1e6
                model = static * factors[each]
                ours.add_row(each, problem, "backward" if backward else "forward", f"{static:.3f}", f"{model:.3f}",
                             f"{model * min(errors[each]):.3f} to {model * max(errors[each]):.3f}")  # fmt: skip
    console.print(ours)
    for each in generation:
        print(f"{each}: {len(errors[each])} points, factor {factors[each]:.3f}, errors {min(errors[each]):.2f} to "
              f"{max(errors[each]):.2f}")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
