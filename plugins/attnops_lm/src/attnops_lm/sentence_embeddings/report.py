"""The demonstration: embed the sentences with every installed operation, and show its agreement, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import attnops
from attnops_lm.installed import attention_operations
from attnops_lm.sentence_embeddings.corpus import load_reference, load_sentences
from attnops_lm.sentence_embeddings.measure import (
    TOLERANCE,
    Encoder,
    EncoderMeasurement,
    SentenceBatch,
    create_attention,
    load_model,
    make_batches,
    measure,
)
from attnops_lm.sentence_embeddings.model import EncoderAttention

QUERIES = (
    "How do I get my bread to come out lighter?",
    "out of memory while loading data",
    "pests in the vegetable garden",
    "the cost of borrowing money",
)

# An operation that can't serve this model, or whose distribution can't be used, is shown with the reason.
REFUSALS = (attnops.UnsupportedError, attnops.PluginError, attnops.AmbiguousOperationError)


class NotRun(NamedTuple):
    """Why there is no measurement of an operation."""

    reason: str
    failed: bool  # whether it raised an exception that is not a refusal


def run(console: Console | None = None, operations: Sequence[str] | None = None) -> int:
    """Run the demonstration and return an exit status.

    Args:
        console: where to print. None: standard output.
        operations: names of operations. None: all that are installed and compute attention.

    Returns:
        0 if at least one operation ran, all that ran agree with the original model, and none failed; otherwise 1. An
        operation that refuses does not count as failed, unless `operations` names it.

    Raises:
        MissingWeightsError: the model's weights are not installed; the message says how to install them.
        UnknownOperationError: `operations` has a name that no installed distribution has.
    """
    console = Console() if console is None else console
    names = attention_operations() if operations is None else operations
    attentions = {name: _create(name) for name in names}
    model, sentences, reference = load_model(), load_sentences(), load_reference()
    batches = make_batches(model, [*sentences, *QUERIES])
    device = jax.devices()[0]
    console.print(
        f"all-MiniLM-L6-v2, {len(sentences)} sentences in {len(batches)} batches, float32, "
        f"on {device.platform} ({device.device_kind}), JAX {jax.__version__}"
    )

    outcomes = _measure_all(console, attentions, model, batches, reference.embeddings)
    measured = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, EncoderMeasurement)}
    if measured:
        first = next(iter(measured))
        corpus, queries = np.split(measured[first].embeddings, [len(sentences)])
        console.print(_neighbours_table(first, sentences, queries, corpus))
        console.print(_operations_table(measured))

    not_run = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, NotRun)}
    for name, outcome in not_run.items():
        verb = "[bold red]failed" if outcome.failed else "[yellow]did not run"
        console.print(f"{escape(name)} {verb}:[/] {escape(outcome.reason)}")
    wrong = [name for name, measurement in measured.items() if not measurement.agrees]
    if wrong:
        console.print(f"[bold red]disagree with the original model:[/] {escape(', '.join(wrong))}")
    if not measured:
        console.print("[bold red]no operation ran, so nothing was shown[/]")
    failed = [name for name, outcome in not_run.items() if outcome.failed or operations is not None]
    return int(bool(wrong or failed or not measured))


def _create(name: str) -> EncoderAttention | NotRun:
    try:
        return create_attention(name)
    except REFUSALS as error:
        return NotRun(str(error), failed=False)


def _measure_all(
    console: Console,
    attentions: Mapping[str, EncoderAttention | NotRun],
    model: Encoder,
    batches: Sequence[SentenceBatch],
    reference: np.ndarray,
) -> dict[str, EncoderMeasurement | NotRun]:
    """By name, the measurement of each operation, or why there is none."""
    outcomes: dict[str, EncoderMeasurement | NotRun] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(attentions) * len(batches))
        for index, (name, attention) in enumerate(attentions.items()):
            progress.update(task, description=escape(name), completed=index * len(batches))
            try:
                outcomes[name] = (
                    attention
                    if isinstance(attention, NotRun)
                    else measure(attention, model, batches, reference, on_batch=lambda: progress.advance(task))
                )
            except REFUSALS as error:
                outcomes[name] = NotRun(str(error), failed=False)
            except Exception as error:  # a broken operation must not hide the others; the exit status is then 1
                outcomes[name] = NotRun(f"{type(error).__name__}: {error}", failed=True)
    return outcomes


def _neighbours_table(operation: str, sentences: Sequence[str], queries: np.ndarray, corpus: np.ndarray) -> Table:
    """Queries [Q, M] and corpus [N, M] -> the three nearest sentences of each of `QUERIES`."""
    title = f"Nearest sentences (by {escape(operation)})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("cosine", justify="right", width=6)
    table.add_column("sentence", ratio=1, no_wrap=True, overflow="ellipsis")
    for query, cosines in zip(QUERIES, queries @ corpus.T, strict=True):
        table.add_row("", f"[bold]{escape(query)}[/]")
        for row in np.argsort(-cosines)[:3]:
            table.add_row(f"{cosines[row]:.3f}", escape(sentences[row]))
    return table


def _operations_table(measured: dict[str, EncoderMeasurement]) -> Table:
    """Agreement, time and memory of each operation."""
    B, T = next(iter(measured.values())).batch_shape
    table = Table(
        title="Operations",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"An operation agrees if no coordinate of any embedding differs from the original PyTorch model's by "
        f"more than {TOLERANCE:g}. Time and memory are those of one batch of {B} × {T} tokens; memory is what XLA "
        f"allocates in addition to weights, tokens and embeddings.",
        caption_justify="left",
    )
    table.add_column("operation", overflow="fold")
    table.add_column("agrees")
    for header in ("max |diff|", "min cos", "batch ms", "compile s", "temp MiB"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, m in measured.items():
        table.add_row(
            escape(name),
            "[green]yes[/]" if m.agrees else "[bold red]no[/]",
            f"{m.max_difference:.1e}",
            f"{m.min_cosine:.6f}",
            f"{m.batch_seconds * 1e3:.1f}",
            f"{m.compile_seconds:.2f}",
            "unknown" if m.temp_bytes is None else f"{m.temp_bytes / 2**20:.1f}",
        )
    return table
