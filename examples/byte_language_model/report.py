"""The demonstration: train with each operation, compare the curves, draw them, and let the model write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import attnops

from .attention import Attention, create_operation, packed, packed_in_reverse
from .comparison import EARLY_BOUND, EARLY_STEPS, FACTOR, LATE_BOUND, Comparison, Losses, compare
from .corpus import load_documents
from .packing import PackedRows, pack
from .plot import write_plot
from .sample import generate
from .training import Run, TrainingPlan, train

# An operation that can't serve this model, or whose distribution can't be used, is shown with the reason.
REFUSALS = (attnops.UnsupportedError, attnops.PluginError, attnops.AmbiguousOperationError)

PROMPT = "Return the "
CHECKPOINTS = 7  # rows of the table of losses


def run(
    plan: TrainingPlan,
    operations: Sequence[str],
    *,
    plot: Path | None = None,
    block: int | None = None,
    documents: Sequence[str] | None = None,
    console: Console | None = None,
) -> int:
    """Run the demonstration and return an exit status.

    Args:
        plan: what to train.
        operations: names; the others are compared with the first, which is trained twice: the control.
        plot: the file of the picture. None: no picture.
        block: queries and keys per tile, for operations that have tiles. None: each operation's default.
        documents: the corpus. None: the text that ships with Python.
        console: where to print. None: standard output.

    Returns:
        0 if every operation ran and its curve agrees with the first's; otherwise 1.

    Raises:
        UnknownOperationError: ``operations`` has a name that no installed distribution has.
        ModuleNotFoundError: ``plot`` is given and matplotlib is not installed.
    """
    console = Console() if console is None else console
    # Created before any slow work, since a name may be unknown.
    attentions, refused = _create_all(operations, block)
    documents = load_documents() if documents is None else documents
    rows = pack(documents, plan.length)
    size = sum(len(text.encode()) for text in documents)
    device = jax.devices()[0]
    console.print(
        f"{len(documents)} documents, {size / 1e6:.2f} MB, in {len(rows.tokens)} rows of {plan.length} bytes; "
        f"{plan.steps} steps of {plan.batch} rows, float32, "
        f"on {device.platform} ({device.device_kind}), JAX {jax.__version__}"
    )

    runs, refused_later = _train_all(console, plan, rows, attentions)
    refused |= refused_later
    for name, reason in refused.items():
        console.print(f"[bold red]{escape(name)} did not run:[/] {escape(reason)}")
    first, control = operations[0], control_of(operations[0])
    if first not in runs or control not in runs:
        console.print(f"[bold red]{escape(first)} gave no curve to compare with[/]")
        return 1

    curves = {name: outcome.losses for name, outcome in runs.items()}
    trained = {name: curve for name, curve in curves.items() if name != control}
    compared = {name: compare(curve, curves[first], curves[control]) for name, curve in curves.items() if name != first}
    console.print(_losses_table(trained))
    console.print(_operations_table(runs, compared))
    if plot is not None:
        write_plot(plot, trained, curves[control])
        console.print(f"curves: {escape(str(plot))}")
    last = list(trained)[-1]
    text = generate(runs[last].params, plan.model, attentions[last], PROMPT, min(160, plan.length - len(PROMPT)))
    # An untrained model may write control characters, which a terminal would obey.
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in text.removeprefix(PROMPT))
    console.print(f"{escape(last)} writes: [bold]{escape(PROMPT)}[/]{escape(shown)}")

    wrong = [name for name, comparison in compared.items() if not comparison.agrees]
    if wrong:
        console.print(f"[bold red]rounding does not explain the curve of:[/] {escape(', '.join(wrong))}")
    return int(bool(wrong or refused))


def control_of(name: str) -> str:
    """The name of an operation's control: the same operation with its keys in reverse."""
    return f"{name} reversed"


def _create_all(names: Sequence[str], block: int | None) -> tuple[dict[str, Attention], dict[str, str]]:
    """Attention by each operation, then the first one's control; and why the others can't be created, by name."""
    attentions: dict[str, Attention] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            attentions[name] = packed(create_operation(name, block))
        except REFUSALS as error:
            refused[name] = str(error)
    if names[0] in attentions:
        attentions[control_of(names[0])] = packed_in_reverse(create_operation(names[0], block))
    return attentions, refused


def _train_all(
    console: Console, plan: TrainingPlan, rows: PackedRows, attentions: Mapping[str, Attention]
) -> tuple[dict[str, Run], dict[str, str]]:
    """The runs by name; and by name why the others did not run."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        for name, attention in attentions.items():
            task = progress.add_task(escape(name), total=plan.steps, loss="compiling")

            def show(loss: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=f"loss {loss:.3f}")

            try:
                runs[name] = train(plan, rows, attention, on_step=show)
            except REFUSALS as error:
                refused[name] = str(error)
    return runs, refused


def _losses_table(curves: Mapping[str, Losses]) -> Table:
    """Losses at some steps, a column per operation; the last digits are where the curves may differ."""
    table = Table(title="Loss, nats a byte", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("step", justify="right")
    for name in curves:
        table.add_column(escape(name), justify="right")
    steps = len(next(iter(curves.values())))
    for step in sorted({round(i * (steps - 1) / (CHECKPOINTS - 1)) for i in range(CHECKPOINTS)}):
        table.add_row(str(step), *(f"{curve[step]:.6f}" for curve in curves.values()))
    return table


def _operations_table(runs: Mapping[str, Run], compared: Mapping[str, Comparison]) -> Table:
    """Whether each operation agrees with the first, and its times. The first has nothing to agree with."""
    allowed = next(iter(compared.values())).allowed  # the same for all
    table = Table(
        title="Operations",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"The largest |difference| of a loss from the first operation's. An operation agrees if that is at "
        f"most {EARLY_BOUND:g} in the first {EARLY_STEPS} steps and {allowed:.1e} in all steps: {FACTOR:g} times that "
        f"of the control, which is the first operation with its keys summed in the opposite order, and between "
        f"{EARLY_BOUND:g} and {LATE_BOUND:g}. The first step compiles; seconds a step are the median of the others.",
        caption_justify="left",
    )
    table.add_column("operation", overflow="fold", min_width=16)
    table.add_column("agrees")
    for header in (f"{EARLY_STEPS} steps", "all steps", "s a step", "first s"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, outcome in runs.items():
        c = compared.get(name)
        agreement = (
            ("", "", "")
            if c is None
            else (
                "[green]yes[/]" if c.agrees else "[bold red]no[/]",
                f"{c.early:.1e}",
                f"{c.largest:.1e}",
            )
        )
        table.add_row(escape(name), *agreement, f"{outcome.step_seconds:.3f}", f"{outcome.first_seconds:.1f}")
    return table
