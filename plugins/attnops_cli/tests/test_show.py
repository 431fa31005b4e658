"""`attnops show`: the picture of a mask and of its tiles."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import attnops_cli
from attnops.masks import Causal, SlidingWindow
from attnops_cli.commands import installed


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["show", *arguments])


def lines(*arguments: str) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_a_mask_is_printed_as_it_shows_itself() -> None:
    shown = lines("causal & SlidingWindow(3, 0)")
    assert shown[0] == "Causal() & SlidingWindow(3, 0), T = 16, S = 16"
    assert shown[1:] == (Causal() & SlidingWindow(3, 0)).show(16).splitlines()


def test_queries_are_aligned_at_the_end() -> None:
    assert lines("Causal()", "-T", "2", "-S", "4")[1:] == ["█ █ █ ·", "█ █ █ █"]


def test_the_batch_that_is_asked_for_is_printed() -> None:
    shown = lines("Lengths([1, 3])", "-T", "2", "-S", "4", "-b", "1")
    assert shown == ["Lengths(<int64 [2]>), T = 2, S = 4, b = 1, h = 0", "█ █ █ ·", "█ █ █ ·"]


def test_long_and_short_names_of_options_mean_the_same() -> None:
    short = lines("Lengths([1, 3])", "-T", "2", "-S4", "-b", "1", "--head", "1")
    assert short == ["Lengths(<int64 [2]>), T = 2, S = 4, b = 1, h = 1", "█ █ █ ·", "█ █ █ ·"]
    spelled = ("--query-length", "2", "--key-length", "4", "--batch", "1", "--head", "1")
    assert lines("Lengths([1, 3])", *spelled) == short
    assert lines("Lengths([1, 3])", "--T=2", "--S", "4", "--b", "1", "--h=1") == short


@pytest.mark.parametrize("command", ["", *installed()])
def test_h_is_help_everywhere_and_no_letter_has_two_dashes(command: str) -> None:
    result = CliRunner().invoke(attnops_cli.make_app(), [*command.split(), "-h"])
    assert result.exit_code == 0
    assert result.output.lstrip().startswith("Usage: ")
    assert not re.search(r"--\w\b(?!-)", result.output)


@pytest.mark.slow
def test_with_block_sizes_the_tiles_are_printed() -> None:
    shown = lines("Causal() & Segments([0, 0, 0, 0, 0, 0, 1, 1])", "-T", "8", "--block-q", "2", "--block-k", "4")
    assert shown[-6:] == [
        "Tiles of 2 × 4: 3 EMPTY, 4 PARTIAL, 1 FULL; 5 of 8 visited",
        "▒ ·",
        "▒ ·",
        "█ ▒",
        "· ▒",
        "· EMPTY: not visited   ▒ PARTIAL: masked   █ FULL: not masked",
    ]


def test_of_a_long_mask_the_tiles_alone_are_printed() -> None:
    shown = lines("Causal()", "-T", "1000000", "--block-q", "250000")
    assert "too large for text" in shown[1]
    assert shown[-5:-1] == ["▒ · · ·", "█ ▒ · ·", "█ █ ▒ ·", "█ █ █ ▒"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("Causal() & SlidingWindow(5, 0) | PrefixLM(2)", "-T", "24", "--block-q", "4"),
        ("Causal()", "-T", "4", "-S", "20"),
        ("Causal()", "-T", "65536", "--block-q", "4096"),  # tiles alone
        ("Segments([0, 0, 1, 1])", "-T", "4", "--block-k", "2"),
    ],
)
@pytest.mark.tier(quick=["arguments0"])
def test_a_mask_is_drawn_as_an_image(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    from matplotlib.image import imread

    path = tmp_path / "mask.png"
    assert str(path) in lines(*arguments, "--output", str(path))[0]
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 200
    assert len({tuple(colour) for colour in pixels[::4, ::4].reshape(-1, 4).tolist()}) > 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("Causal(",), "mask='Causal(' can't be read"),
        (("Kausal()",), "mask='Kausal' is unknown"),
        (("Lengths((4,))",), "needs its values; list them"),
        (("1x1x16x16",), "needs its values; list them"),
        (("Segments([0, 1])",), "Segments' q_ids has shape (2,), but must have shape [16]"),
        (("SlidingWindow(-1, 0)",), "SlidingWindow's left=-1 must be at least 0"),
        (
            ("MaskFn(1)",),
            "mask='MaskFn' is unknown; write an expression of Ancestors, Blocks, Causal, Chunked, Dense, Full, KeyP",
        ),
        (("Segments([0, 'a', 1])", "-T", "3"), "Segments' q_ids has dtype <U21, but must be integers"),
        (("Lengths(5)",), "Lengths' kv_lengths has shape (), but must have shape [B]=(1,)"),
        (("Segments([[0, 1], [0, 0]])", "-T", "2", "-b", "5"), "q_ids has shape (2, 2), but must have shape [2] or"),
        (("Causal()", "-T", "100000", "--output", "mask.png"), "T=100000 and S=100000 are too many to draw"),
        (("Causal()", "--output", "/nowhere/mask.png"), "No such file or directory"),
        (("Causal()", "--output", "mask.docx"), "docx"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("attnops: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_an_image_without_matplotlib_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("Causal()", "--output", "mask.png")
    assert result.exit_code == 2
    assert "the image needs matplotlib" in result.stderr
