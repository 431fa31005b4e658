"""The report of `attnops prove` as Markdown, and two records side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attnops_testing.bench import one_line
from attnops_testing.prove.plan import TIMES
from attnops_testing.prove.predicted import predicted
from attnops_testing.prove.record import Record
from attnops_testing.prove.step import BAD, Ending, Result

# Characters of a cell; details are complete below the tables.
_CELL = 160


def markdown(record: Record) -> str:
    """The report of a record."""
    counts = Counter(result.ending for result in record.results.values())
    left = len(record.steps) - len(record.results)
    total = ", ".join(f"{counts[ending]} {ending}" for ending in Ending if counts[ending])
    devices = Counter(record.machine["devices"])
    lines = [
        "# attnops prove", "",
        f"{', '.join(f'{n} × {kind}' for kind, n in devices.items())}; {one_line(record.machine)}", "",
        f"**{total}**{f'; {left} steps did not run' if left else ''}", "",
    ]  # fmt: skip
    lines += [f"- {problem['what']}: {problem['install']}" for problem in record.problems]
    for section in dict.fromkeys(step.section for step in record.steps):
        rows = [(name, result) for (where, name), result in record.results.items() if where == section]
        if rows:
            lines += ["", f"## {section}", "", *(_times(record, rows) if section == TIMES else _checks(rows))]
    bad = [(section, name, result) for (section, name), result in record.results.items() if result.is_bad]
    if bad:
        lines += ["", "## What is wrong"]
    for section, name, result in bad:
        lines += ["", f"### {section}: {name}", "", *_block(result.detail), *_block(result.output)]
    return "\n".join(lines) + "\n"


def _checks(rows: Sequence[tuple[str, Result]]) -> Iterator[str]:
    """A table: right rows as a count by operation, others each with its reason."""
    right = Counter(name.rpartition(": ")[0] or name for name, result in rows if result.ending is Ending.RIGHT)
    yield from (f"{count} right: `{operation}`  " for operation, count in right.items())
    others = [(name, result) for name, result in rows if result.ending is not Ending.RIGHT]
    if others:
        yield from ("", "| check | result | why | s |", "|---|---|---|--:|")
    for name, result in others:
        yield f"| {_cell(name)} | {_ending(result.ending)} | {_cell(result.detail)} | {result.seconds:.1f} |"


def _times(record: Record, rows: Sequence[tuple[str, Result]]) -> Iterator[str]:
    yield "| call | operation | best ms | median ms | TFLOP/s or GB/s | × best peer | predicted ms | MB | |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|---|"
    for name, result in rows:
        if result.is_bad and not result.value:
            yield f"| {name} | | | | | | | | {_ending(result.ending)}: {_cell(result.detail)} |"
        peers = [m["best_seconds"] for m in result.value or () if m["is_peer"] and m["best_seconds"]]
        for m in result.value or ():
            best, median = m["best_seconds"], m["median_seconds"]
            is_ours = not m["is_peer"] and not m["name"].startswith("one read")
            ratio = f"{min(peers) / best:.2f} ×" if best and peers and is_ours else ""
            model = predicted(record.machine["devices"][0], m)
            memory = "" if m["temp_bytes"] is None else f"{m['temp_bytes'] / 1e6:,.0f}"
            state = "" if m["status"] == "ok" else f"{m['status']}: {_cell(m['reason'])}"
            cells = name, m["name"], _ms(best), _ms(median), _rate(m), ratio, model, memory, state
            yield f"| {' | '.join(cells)} |"
    yield from (f"| every call | {name} | | | | | | | {_cell(why)} |" for name, why in record.peers.items() if why)


def _rate(m: dict[str, Any]) -> str:
    """TFLOP/s of the products that a causal or a full mask needs, or GB/s of the tokens that are seen."""
    if not (best := m["best_seconds"]):
        return ""
    if m["bytes_seen"]:
        return f"{m['bytes_seen'] / best / 1e9:,.0f} GB/s"
    if m.get("mask") not in ("", "Causal()"):
        return ""
    products = 4 * m["batch"] * m["heads"] * m["length"] ** 2 * m["head_dim"] / (2 if m["mask"] else 1)
    return f"{products * (3.5 if m['backward'] else 1) / best / 1e12:,.2f}"


def compare(one: Record, other: Record) -> str:
    """Markdown of what differs between two records: endings, and times as a ratio."""
    lines = [
        "# attnops prove, compared", "",
        f"- one: {', '.join(dict.fromkeys(one.machine['devices']))}; {one_line(one.machine)}",
        f"- other: {', '.join(dict.fromkeys(other.machine['devices']))}; {one_line(other.machine)}", "",
    ]  # fmt: skip
    keys = dict.fromkeys([*one.results, *other.results])
    differ = [key for key in keys if _of(one, key) != _of(other, key)]
    lines += [f"{len(keys) - len(differ)} of {len(keys)} steps ended alike."]
    if differ:
        lines += ["", "| step | one | other |", "|---|---|---|"]
        lines += [f"| {_cell(': '.join(key))} | {_of(one, key)} | {_of(other, key)} |" for key in differ]
    rows = list(_ratios(one, other))
    if rows:
        lines += ["", "| call | operation | one, ms | other, ms | other over one |", "|---|---|--:|--:|--:|", *rows]
    return "\n".join(lines) + "\n"


def _ratios(one: Record, other: Record) -> Iterator[str]:
    for key, result in one.results.items():
        found = {m["name"]: m for m in (other.results[key].value or ())} if key in other.results else {}
        for m in (result.value or ()) if key[0] == TIMES else ():
            both = m["best_seconds"], found.get(m["name"], {}).get("best_seconds")
            if all(both):
                yield f"| {key[1]} | {m['name']} | {_ms(both[0])} | {_ms(both[1])} | {both[1] / both[0]:.2f} |"


def _of(record: Record, key: tuple[str, str]) -> str:
    return str(record.results[key].ending) if key in record.results else "–"


def _ending(ending: Ending) -> str:
    return f"**{ending}**" if ending in BAD else str(ending)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3f}"


def _cell(text: str) -> str:
    """Text of one line that fits a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _CELL else line[: _CELL - 1] + "…"


def _block(text: str) -> Iterable[str]:
    return ("```text", text.strip().replace("```", "'''"), "```") if text.strip() else ()
