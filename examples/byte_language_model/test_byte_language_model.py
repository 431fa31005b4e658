"""Documents are packed without a leak, and every operation gives vanilla's training curve, to rounding."""

from __future__ import annotations

import dataclasses
import functools
import io
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import attnops

from . import corpus, report, train
from .attention import Attention, create_operation, packed, packed_in_reverse
from .comparison import EARLY_BOUND, EARLY_STEPS, FACTOR, LATE_BOUND, Comparison, Losses, compare
from .model import Config, init, logits
from .packing import END, PackedRows, pack
from .sample import generate
from .training import Run, TrainingPlan
from .training import train as run_training

SCRIPT = Path(__file__).with_name("train.py")
SMALL = TrainingPlan(steps=EARLY_STEPS, batch=4, length=64, model=Config(layers=2, width=32, heads=4, kv_heads=2))
BLOCK = 16  # so that a row of 64 is 4 × 4 tiles, some of which the documents' borders leave empty
TEXTS = ("abc", "de", "fghij", "kl", "ä" * 9)


@functools.cache
def small_rows() -> PackedRows:
    """Short documents, so that most rows of 64 hold several."""
    return pack([text for text in corpus.load_documents() if len(text) < 100], SMALL.length)


@functools.cache
def small_losses(name: str) -> Losses:
    return run_training(SMALL, small_rows(), packed(create_operation(name, BLOCK))).losses


@functools.cache
def small_control() -> Losses:
    return run_training(SMALL, small_rows(), packed_in_reverse(create_operation("vanilla"))).losses


def compare_small(losses: Losses) -> Comparison:
    return compare(losses, small_losses("vanilla"), small_control())


# Packing


def test_rows_are_the_picture_of_the_docstring() -> None:
    rows = pack(["abc", "de", "fghij"], 6)
    assert bytes(rows.tokens.astype(np.uint8).ravel()) == b"abc\0de\0fghij\0\0\0\0\0\0"
    np.testing.assert_array_equal(rows.segments, [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(rows.predicts, [[1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("length", [1, 2, 5, 7, 16, 64])
def test_every_byte_is_there_once_and_none_predicts_across_a_border(length: int) -> None:
    rows = pack(TEXTS, length)
    stream = b"".join(text.encode() + b"\0" for text in TEXTS)
    flat = bytes(rows.tokens.astype(np.uint8).ravel())
    assert flat.rstrip(b"\0") + b"\0" == stream
    assert 0 <= len(flat) - len(stream) < length

    # Segments are contiguous and counted from 0, and positions from the beginning of each.
    steps = np.diff(rows.segments, axis=1)
    assert set(steps.ravel()) <= {0, 1}
    assert not rows.segments[:, 0].any()
    np.testing.assert_array_equal(rows.positions[:, 1:], np.where(steps == 1, 0, rows.positions[:, :-1] + 1))
    assert not rows.positions[:, 0].any()

    # A target is the next byte of the same segment: every byte but the first of a segment, and never padding.
    assert not rows.predicts[:, -1].any()
    assert not (rows.predicts[:, :-1] & (steps == 1)).any()
    first = np.zeros(len(stream), bool)
    first[::length] = True
    first[np.cumsum([0, *(len(text.encode()) + 1 for text in TEXTS[:-1])])] = True
    assert rows.predicts.sum() == (~first).sum()


@pytest.mark.slow
def test_the_corpus_is_the_same_each_time_and_has_no_end_mark() -> None:
    documents = corpus.load_documents()
    corpus.load_documents.cache_clear()
    assert corpus.load_documents() == documents
    assert len(set(documents)) == len(documents) > 79
    assert sum(map(len, documents)) > 400_000, "the help topics alone have more"
    assert not any(chr(END) in text for text in documents)


def test_a_python_without_licence_and_sources_has_the_help_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "LICENSE").write_text("of something else")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    assert corpus.licences() == []
    assert list(corpus.docstrings()) == []
    (tmp_path / "LICENSE").write_text("PYTHON SOFTWARE FOUNDATION LICENSE\n")
    assert corpus.licences() == ["PYTHON SOFTWARE FOUNDATION LICENSE"]


# The model


@pytest.mark.slow
def test_a_document_is_scored_as_if_it_were_alone() -> None:
    params, attention = init(SMALL.model, 0), packed(create_operation("vanilla"))
    together, alone = pack(["some words", "and others", "that follow"], 34), pack(["and others"], 11)

    score = jax.jit(lambda rows: logits(params, SMALL.model, rows, attention))
    np.testing.assert_allclose(score(together)[0, 11:22], score(alone)[0], rtol=0, atol=1e-5)


# Training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "ring", "flash"])
@pytest.mark.tier(every=3)
def test_operation_gives_the_curve_of_vanilla(name: str) -> None:
    comparison = compare_small(small_losses(name))
    assert comparison.agrees, comparison


@pytest.mark.slow
def test_loss_falls() -> None:
    losses = small_losses("vanilla")
    assert losses[0] > 5.5, "at first all bytes are about equally likely, or worse: ln(256) is 5.55"
    assert losses[-5:].mean() < losses[0] - 1, "single batches are small, and other ones in another Python"


@pytest.mark.slow
def test_control_differs_by_rounding() -> None:
    assert compare_small(small_control()).agrees


@pytest.mark.slow
def test_leaving_out_segments_is_noticed() -> None:
    # All of a row in one segment: Causal() alone. Targets and positions stay as they are.
    rows = dataclasses.replace(small_rows(), segments=np.zeros_like(small_rows().segments))
    comparison = compare_small(run_training(SMALL, rows, packed(create_operation("vanilla", BLOCK))).losses)
    assert comparison.early > 100 * EARLY_BOUND
    assert not comparison.agrees


@pytest.mark.parametrize(
    ("late", "rounding", "agrees"),
    [
        (0.5 * EARLY_BOUND, 0.0, True),  # the control may happen not to differ at all
        (2 * EARLY_BOUND, 0.0, False),
        (0.9 * FACTOR * 1e-5, 1e-5, True),
        (1.1 * FACTOR * 1e-5, 1e-5, False),
        (2 * LATE_BOUND, LATE_BOUND, False),  # a control that strays far explains nothing
        (np.nan, 1e-5, False),
        (0.0, np.nan, False),
    ],
)
def test_comparison_allows_what_the_control_explains(late: float, rounding: float, agrees: bool) -> None:
    reference = np.zeros(EARLY_STEPS + 1, np.float32)
    end = np.arange(len(reference)) == EARLY_STEPS
    curve, control = (np.where(end, x, reference).astype(np.float32) for x in (late, rounding))
    assert compare(curve, reference, control).agrees == agrees
    early = np.where(end[::-1], 2 * EARLY_BOUND, reference).astype(np.float32)
    assert not compare(early, reference, control).agrees


# What is shown


@pytest.mark.slow
def test_generation_ends_with_the_document() -> None:
    def end_of_text(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        return jnp.zeros_like(query)

    params = init(SMALL.model, 0)
    head = jnp.zeros_like(params.head).at[0, ord("x")].set(1.0)
    attention: Attention = end_of_text
    tokens = params.tokens.at[:, 0].set(1e3)  # every byte is followed by "x", …
    tokens = tokens.at[ord("x"), 0].set(-1e3)  # … but "x" by byte 0, the first of those that are as likely
    changed = type(params)(tokens=tokens, layers=params.layers, norm=params.norm, head=head)
    assert generate(changed, SMALL.model, attention, "ab", 8) == "abx"


@pytest.mark.parametrize(("stray", "status"), [(1e-6, 0), (1e-3, 1)])
def test_report_shows_losses_agreement_and_a_sample(
    stray: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=160)
    curves = iter([0.0, stray, 1e-6])  # of vanilla, sdpa and the control

    def fake(plan: TrainingPlan, rows: PackedRows, attention: Attention, **_: object) -> Run:
        losses = np.linspace(5, 2, plan.steps) + next(curves)
        params = init(plan.model, plan.seed)
        return Run(losses=losses.astype(np.float32), params=params, first_seconds=1.0, step_seconds=0.1)

    monkeypatch.setattr(report, "train", fake)
    picture = tmp_path / "losses.png"
    assert report.run(SMALL, ["vanilla", "sdpa"], plot=picture, documents=TEXTS, console=console) == status
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert ("rounding does not explain the curve of: sdpa" in printed) == bool(status)
    for shown in ("step", "vanilla reversed", f"sdpa writes: {report.PROMPT}", str(picture)):
        assert shown in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_report_fails_when_an_operation_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Run:
        raise attnops.UnsupportedError("out of [order]")

    monkeypatch.setattr(report, "train", refuse)
    console = Console(file=io.StringIO(), width=160)
    assert report.run(SMALL, ["vanilla"], documents=TEXTS, console=console) == 1
    assert isinstance(console.file, io.StringIO)
    assert "vanilla did not run: out of [order]" in console.file.getvalue()


@pytest.mark.parametrize("arguments", [["--operations", "a,a"], ["--operations", "a,"], ["--steps", "0"]])
def test_arguments_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(arguments)
    assert exit_.value.code == 2


@pytest.mark.slow
def test_script_runs_by_its_path_and_refuses_an_unknown_operation(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--operations", "no_such_operation"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no_such_operation" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_full_training_agrees_and_draws_its_curves(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    picture = tmp_path / "losses.png"
    # In tiles of 64: with the table's sizes a row of 256 would be one tile.
    status = report.run(TrainingPlan(), ["vanilla", "flash"], plot=picture, block=64, console=console)
    assert isinstance(console.file, io.StringIO)
    assert status == 0, console.file.getvalue()
    assert picture.read_bytes().startswith(b"\x89PNG")
