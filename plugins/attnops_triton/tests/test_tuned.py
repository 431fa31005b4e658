"""Tables of measured times, and the code that reads them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry, Rank, explain
from attnops.masks import Causal, SlidingWindow
from attnops_triton import tuned
from attnops_triton.aot import kernels
from attnops_triton.flash import measured, tune
from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.tile_sizes import SPECIALISED, TABLE
from attnops_triton.language import compat
from attnops_triton.tuned import MeasuredTime

NAME = "attnops-triton:flash"
SHAPE = ("bfloat16", 64, 64, "causal", 4096)
ROWS = [
    MeasuredTime("H100", "forward", *SHAPE, (128, 64, 8, 3), 2e-3),
    MeasuredTime("H100", "forward", *SHAPE, (64, 64, 4, 3), 1e-3),
    MeasuredTime("H100", "forward", *SHAPE[:4], 1024, (32, 32, 4, 1), 1e-4),
    MeasuredTime("H100", f"{NAME}, backward", *SHAPE, (), 3e-3),
    MeasuredTime("H100", "attnops:sdpa, backward", *SHAPE, (), 4e-3),
    MeasuredTime("A100", "forward", *SHAPE, (128, 32, 8, 2), 1e-3),
]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table that the environment names, on a machine with the first GPU."""
    tuned.write(tmp_path / "tuned.json", ROWS)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned.json"))
    monkeypatch.setattr(compat, "device_name", lambda: "H100")
    return tmp_path / "tuned.json"


def test_a_table_is_the_same_text_whatever_the_order_it_was_merged_in(tmp_path: Path) -> None:
    texts = set()
    for i, some in enumerate(itertools.islice(itertools.permutations(ROWS), 0, 720, 97)):
        path = tmp_path / f"{i}.json"
        tuned.write(path, some[:3])
        tuned.write(path, [*tuned.read(path), *some[2:]])
        texts.add(path.read_text())
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) == 2 + len(ROWS) - 1, "a row a line; of two that measured the same, one"


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "rows": []}', '{"format": 1, "rows": [{"device": ""}]}'])
def test_a_file_that_is_no_table_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError, match=r"some.json must be a table of format 1, as `attnops tune` writes"):
        tuned.read(tmp_path / "some.json")


def test_kernels_have_the_tiles_that_were_fastest_on_this_device_at_the_longest_length(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured.measured_tiles("bfloat16", 64, 64) == {0: TileSizes(64, 64, 4, 3)}
    assert measured.measured_tiles("bfloat16", 128, 128) == {}
    monkeypatch.setattr(compat, "device_name", lambda: "B200")
    assert measured.measured_tiles("bfloat16", 64, 64) == {}


def test_tiles_that_are_tried_are_those_of_the_kernel() -> None:
    shape = tune.TunedCall("bfloat16", 64, 256, "causal")
    with measured.trying("by_query", TileSizes(32, 64, 4, 3)):
        found = kernels(tune._both(shape.call(NAME)), (shape.array,) * 3, "sm_90")
    forward, by_key = (SPECIALISED["sm_90"][64][i] for i in (0, 2))
    assert [x.tiles for x in found] == [forward, TileSizes(32, 64, 4, 3), by_key]


@pytest.mark.parametrize(
    ("mask", "length", "mode", "seconds", "rank"),
    [
        (Causal(), 4096, "train", 4e-3, Rank.MEASURED),
        (Causal(), 8192, "train", 4e-3, Rank.MEASURED),
        (Causal(), 4096, "train", 2e-3, Rank.KERNEL),
        (Causal(), 16384, "train", 4e-3, Rank.KERNEL),  # too far from what was measured: by bytes
        (Causal(), 4096, "prefill", 4e-3, Rank.KERNEL),
        (None, 4096, "train", 4e-3, Rank.KERNEL),
        (Causal() & SlidingWindow(63, 0), 4096, "train", 2e-3, Rank.TILED_KERNEL),
    ],
)
def test_auto_picks_what_was_measured_to_be_faster(
    mask: Any, length: int, mode: str, seconds: float, rank: Rank, table: Path
) -> None:
    tuned.write(table, [*ROWS[:4], dataclasses.replace(ROWS[4], seconds=seconds)])
    tuned._installed.cache_clear()
    x = jnp.ones((1, length, 1, 64), jnp.bfloat16)
    auto: Any = OperationRegistry.create("auto", OperationMetadata(platform="cuda"))
    chosen = explain(auto.request(x, x, x, mask=mask, mode=mode)).chosen
    assert chosen.name == ("attnops:sdpa" if rank is Rank.KERNEL else NAME)
    assert rank is Rank.KERNEL or chosen.rank is rank


@dataclasses.dataclass
class Compiled:
    """A kernel's figures."""

    tiles: TileSizes

    @property
    def shared(self) -> int:
        return 1 << 20 if self.tiles.stages == 3 else 1

    @property
    def spilled(self) -> int:
        return int(self.tiles.warps == 4)


def test_tuning_writes_the_fastest_tiles_that_fit_and_the_times_of_both_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "compile_for", lambda launched, arch: Compiled(launched.tiles))
    monkeypatch.setattr(tune, "device_name", lambda: "H100")
    monkeypatch.setattr(tune, "device_arch", lambda: "sm_90")
    tried: list[Any] = []

    def seconds(function: Any, shape: Any) -> float:
        tried.append(measured._TRIED.value)
        return 1.0 if not tried[-1] else 1.0 / (tried[-1][1].bk / tried[-1][1].bq)

    monkeypatch.setattr(tune, "_seconds", seconds)
    output = tmp_path / "tuned.json"
    tune.run(["bfloat16"], [64], [1024], ["causal"], output, [], "", lambda line: None)
    found = {row.what: row.tiles for row in tuned.read(output)}
    forward, by_query, by_key, _ = TABLE["sm_90"][2][128]
    assert found["forward"] == (forward.bq // 2, forward.bk, forward.warps, forward.stages)
    assert found["by_query"] == (by_query.bq // 2, by_query.bk, by_query.warps, by_query.stages)
    assert found["by_key"] == (by_key.bq // 2, by_key.bk, by_key.warps, by_key.stages)
    calls = {*measured.CALLS.values(), *measured.CUDNN_CALLS.values()}
    assert {what for what, tiles in found.items() if not tiles} == calls
    assert all(not one or (one[1].stages < 3 and one[1].warps == 8) for one in tried), "what does not fit is not timed"


@pytest.mark.slow
def test_sm_103_is_tuned_with_its_specialised_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_for", lambda launched, arch: SimpleNamespace(shared=1, spilled=0))
    found = [(x.kernel, x.tiles) for x in tune.candidates(tune.TunedCall("bfloat16", 64, 1024, "causal"), "sm_103")]
    assert ("forward", SPECIALISED["sm_100"][64][0]) in found


@pytest.mark.slow
def test_without_a_gpu_tuning_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "device_arch", lambda: "")
    with pytest.raises(ValueError, match=r"this machine has none; dry compiles without one"):
        tune.run(["bfloat16"], [64], [64], ["full"], None, [], "", print)
    with pytest.raises(ValueError, match=r"dry='sm_1' is unknown; use one of"):
        tune.run(["bfloat16"], [64], [64], ["full"], None, [], "sm_1", print)
