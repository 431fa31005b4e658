"""`attnops prove`: whether the kernels of this machine's device work, and how fast."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnops_cli.output import fail, print_text, printer
from attnops_testing.prove.plan import TIMES, alone
from attnops_testing.prove.process import kill_all, run
from attnops_testing.prove.record import Record
from attnops_testing.prove.report import compare, markdown
from attnops_testing.prove.step import Ending, Step

# Seconds to start JAX on the device and to import every plugin.
_FIND = 300.0


def command(
    operations: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of operations, also distribution:operation.",
            show_default="those with a kernel for this device",
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="The report, in Markdown; the record is beside it, with the suffix .json.")
    ] = Path("attnops-prove.md"),
    every: Annotated[
        bool, typer.Option("--all", help="Each feature alone, long problems, pairs and corners too.")
    ] = False,
    section: Annotated[
        list[str] | None, typer.Option(help="Run only this section, such as Times; may be repeated.", metavar="NAME")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Seconds for a check.", show_default="60 on CPUs, else 240", min=1)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Checks at a time; times are measured one at a time, after them.",
            show_default="half of the processors, at most 8; 1 on TPUs, which one process holds",
            min=1,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run all again rather than continue the record.")] = False,
    compared: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="Print how two records differ, and run nothing.", metavar="ONE OTHER"),
    ] = None,
) -> None:
    """Prove the kernels of this machine's device: a report to keep, or to send with an issue.

    First calls come first, the smallest before the others, then every feature, caches and behaviours, and linear
    attention if attnops-linear is installed, each compared with a float64 oracle; then times next to those of installed
    peers, with memory and with the times that static counts predict. Each check runs in a process of its own with a
    time limit: a crash or a hang is a row of the report. A run that was stopped goes on where it ended.

    Exits with 1 if anything is wrong, crashed or hung, with 2 if the arguments are invalid, with 130 if it was stopped.
    """
    if compared is not None:
        try:
            print_text(compare(*map(Record.read, compared)))
        except (OSError, ValueError) as error:
            fail(error, 2)
        return
    path = report.with_suffix(".json")
    if path == report:
        fail(f"--report={report} must not end in .json, which is the record's name", 2)
    # As `timeout` and schedulers stop a run: its process is stopped with it, and the report is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
    try:
        record = _begin(operations or [], every, limit, section)
        if path.exists() and not fresh and (kept := record.resume(Record.read(path))):
            print_text(f"{kept} of {len(record.steps)} steps are in {path}; --fresh runs them again")
        record.write(path)
    except (OSError, ValueError) as error:
        fail(error, 2)
    stopped = False
    try:
        _run(record, path, jobs or _default_jobs(record))
    except KeyboardInterrupt:
        stopped = True
    record.running = []
    record.write(path)
    report.write_text(markdown(record))
    counts = Counter(result.ending for result in record.results.values())
    print_text(f"\n{', '.join(f'{counts[ending]} {ending}' for ending in Ending if counts[ending])}")
    print_text(f"{report} is the report; {path} is for attnops prove --compare")
    raise typer.Exit(130 if stopped else int(any(result.is_bad for result in record.results.values())))


def _begin(operations: list[str], every: bool, limit: float | None, sections: list[str] | None) -> Record:
    """A record without results. Another process asks JAX for its devices: this one must not hold them.

    Raises:
        ValueError: the device can't be used, or an operation or a section is unknown.
    """
    arguments = {"operations": operations, "every": every, "limit": limit}
    found = run(Step("Machine", "devices", "find_machine", arguments, _FIND))
    if found.ending is not Ending.RIGHT:
        raise ValueError(f"{found.detail}\n{found.output}".strip())
    steps = [Step(**step) for step in found.value["steps"]]
    known = list(dict.fromkeys(step.section for step in steps))
    for name in sections or ():
        if name not in known:
            raise ValueError(f"section {name!r} is unknown; there are {', '.join(known)}")
    chosen = [step for step in steps if not sections or step.section in sections]
    return Record(found.value["machine"], found.value["problems"], chosen, peers=found.value["peers"])


def _default_jobs(record: Record) -> int:
    """Half of the processors, at most 8; 1 on TPUs, which one process holds."""
    if any("TPU" in kind for kind in record.machine["devices"]):
        return 1
    return min(8, max(1, (os.cpu_count() or 1) // 2))


def _run(record: Record, path: Path, jobs: int) -> None:
    """Run the steps without a result; print those that are not right as soon as they are known."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    out, lock, stopped = printer(), threading.Lock(), threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(record.steps), completed=len(record.results))

        def run_one(step: Step) -> None:
            key = step.section, step.name
            with lock:
                if stopped.is_set():
                    return
                progress.update(task, description=f"{step.section}: {step.name}", total=len(record.steps))
                record.running.append(key)
                record.write(path)
            result = run(step, stopped)
            with lock:
                if stopped.is_set():  # it was killed
                    return
                record.results[key] = result
                record.running.remove(key)
                record.write(path)
                if result.ending not in (Ending.RIGHT, Ending.REFUSED):
                    out.print(f"{step.section}: {step.name}: {result.ending}: {result.detail}", markup=False)
                progress.update(task, advance=1)

        pool = ThreadPoolExecutor(jobs)
        try:
            left = [x for x in record.steps if (x.section, x.name) not in record.results]
            list(pool.map(run_one, (x for x in left if x.section != TIMES)))
            for step in (times := [x for x in record.steps if x.section == TIMES]):
                if (step.section, step.name) not in record.results:
                    run_one(step)
                if record.results[step.section, step.name].ending in (Ending.CRASH, Ending.HANG):
                    known = {(x.section, x.name) for x in record.steps}
                    further = [x for x in alone(step) if (x.section, x.name) not in known]
                    times += further
                    record.steps = [*record.steps, *further]
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()
            pool.shutdown()
