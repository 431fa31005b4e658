"""The scoreboard as a page of Markdown, from the record of each library."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attnops_testing.score.cases import Size, cases
from attnops_testing.score.environments import Library
from attnops_testing.score.judge import FAULTS, Verdict

MARKS: Final = {
    Verdict.RIGHT: "✓", Verdict.FORWARD: "✓ᶠ",
    Verdict.CONVENTION: "≈", Verdict.OPEN: "?", Verdict.REFUSED: "–",
    Verdict.CRASH: "**crash**", Verdict.NAN: "**NaN**", Verdict.WRONG: "**wrong**", Verdict.NOT_RUN: "·",
}  # fmt: skip
# More cases with one reason are counted, not listed.
_LISTED: Final = 12
_HEAD: Final = """\
# The scoreboard

Which attention computes what, as users call it today. `attnops score --write docs/scoreboard.md` wrote this page: each
library runs in an environment of its own, through an adapter of at most 60 lines, on the CPU (Linux, x86-64), with the
library's defaults and no `XLA_FLAGS`. Its outputs and gradients are compared with a float64 oracle by the rule of
[attnops-testing](api/testing.md): at most 2 times (gradients: 3 times) the error of the plain computation in the same
dtype, and 2 ulp. Other devices, versions and implementations of these libraries may do something else.

| | |
|---|---|
| ✓ | right: the output and the gradients of all inputs, or a call that must be refused is |
| ✓ᶠ | right forward; the library refuses to compute gradients, or they are not probed |
| ≈ | another convention than attnops', which the library documents |
| ? | another convention than attnops', on which the library's documentation is silent; not a fault |
| – | refused: the library raises an error, or has no argument for it |
| · | not run: Pallas's interpreter, in which kernels for TPUs run on a CPU, fails, which is not the library's fault |
| **NaN** | wrong in silence: NaN where the library's documentation, or another result of it, defines the answer |
| **wrong** | wrong in silence: other numbers, or no error where the documentation's own code raises one |
| **crash** | an error of Python's internals (KeyError, AttributeError, …), a dead process, or no end |

Attention over no key has no defined output. What a library gives for such rows is a convention; their cotangents are
zero. "Right" and "undocumented" are relative to attnops' contract, which other libraries never promised. Each fault,
and some undocumented conventions, have a script below that shows them without attnops.
Kernels for TPUs run in Pallas's interpreter, which shows what they compute, not what a device's compiler makes of them.
attnops' own operations are checked by its conformance suite (`attnops check`).
"""


def markdown(records: Mapping[str, dict[str, Any]], known: Mapping[str, Library], repros: Path, link: str) -> str:
    """The page.

    Args:
        records: by library's name, what `attnops score` recorded.
        known: the libraries; others are left out.
        repros: the folder of scripts that show faults.
        link: the folder as the page links to it.
    """
    names = [name for name in known if name in records]
    heads = (f"[{x}](#{x.replace('_', '-')})" for x in names)
    lines = [_HEAD, "## All", "", f"| | {' | '.join(heads)} |"]
    lines.append(f"|---|{':-:|' * len(names)}")
    for case in (case.name for case in cases(Size())):
        cells = (MARKS[Verdict(records[x]["rows"].get(case, ["not run"])[0])] for x in names)
        lines.append(f"| {case} | {' | '.join(cells)} |")
    counts = {x: Counter(row[0] for row in records[x]["rows"].values()) for x in names}
    for verdict in Verdict:
        lines.append(f"| *{verdict}* | {' | '.join(str(counts[x][verdict]) for x in names)} |")
    scripts = find_repros(repros)
    for name in names:
        lines += ["", *_library(records[name], known[name], scripts, link)]
    return "\n".join(lines) + "\n"


def _library(record: dict[str, Any], library: Library, scripts: dict[tuple[str, str], str], link: str) -> Iterator[str]:
    yield f"## {library.name}"
    yield ""
    yield f"{library.about} Version {record['version']}, {record['date']}. [Documentation]({library.declared['LINK']})."
    alone = "".join(f", {x} without what it requires" for x in library.alone)
    yield f"Installed: `{', '.join(library.requirements)}`{alone}."
    rows = {case: (Verdict(verdict), detail) for case, (verdict, detail) in record["rows"].items()}
    faults: defaultdict[tuple[Verdict, str], list[str]] = defaultdict(list)
    for case, row in rows.items():
        if row[0] in FAULTS:
            faults[row].append(case)
    for i, ((verdict, detail), found) in enumerate(faults.items()):
        names = dict.fromkeys(scripts.get((library.name, case), "") for case in found)
        where = " ".join(f"[{script}]({link}/{script})" if script else "no script yet" for script in names)
        yield f"{'' if i else chr(10)}- **{'; '.join(found)}: {verdict}.** `{_plain(detail)}` {where}"
    for kind, title in (
        (Verdict.CONVENTION, "Documented conventions"),
        (Verdict.OPEN, "Undocumented conventions"),
        (Verdict.FORWARD, "Right forward alone"),
        (Verdict.REFUSED, "Refused"),
        (Verdict.NOT_RUN, "Not run"),
    ):
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for case, (verdict, detail) in rows.items():
            if verdict is kind:
                by_reason[detail].append(case)
        if by_reason:
            yield f"\n{title}:\n"
        for detail, found in by_reason.items():
            text = detail if kind in (Verdict.CONVENTION, Verdict.OPEN) else f"`{_plain(detail)}`"
            if kind is Verdict.CONVENTION:
                text += f" ({library.declared['CONVENTIONS'][detail]})"
            shown = [script for case in found if (script := scripts.get((library.name, case)))]
            which = "; ".join(found) if len(found) <= _LISTED else f"{len(found)} cases"
            yield f"- {which}: {text}{''.join(f' [{x}]({link}/{x})' for x in shown)}"


def find_repros(folder: Path) -> dict[tuple[str, str], str]:
    """The script of each fault or convention, by library and case.

    Scripts have lines ``# shows: LIBRARY: CASE; CASE; …``.
    """
    return {
        (library, case): path.name
        for path in sorted(folder.glob("*.py"))
        for library, cases_shown in re.findall(r"^# shows: ([a-z0-9_]+): (.*)$", path.read_text(), re.MULTILINE)
        for case in cases_shown.split("; ")
    }


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")
