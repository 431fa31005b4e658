"""Where instructions are in the loops of compiled kernels. Assemblers move them, so that what was written to run
together may run one after the other.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from attnops_triton.aot import innermost_loops


class Statement(NamedTuple):
    """How many instructions of a name a part of a loop has. Parts end at each instruction that is a mark."""

    words: str  # what is lost where this is not so
    part: int
    name: str
    least: int
    most: int


class Loop(NamedTuple):
    """What is true of loops that have an instruction ``has``, and none ``without``."""

    has: str
    without: str
    count: int  # of such loops
    mark: str
    parts: int
    statements: tuple[Statement, ...]


def exactly(words: str, part: int, name: str, count: int) -> Statement:
    """The part has ``count`` of them."""
    return Statement(words, part, name, count, count)


def names(lines: list[str]) -> list[str]:
    """The instructions of SASS: names up to the first dot, and waits with what may still be in flight."""
    found = []
    for line in lines:
        if match := re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)", line):
            name, operands = match[1], match[2]
            limit = int(operands.split(",")[-1], 16) if "DEPBAR" in name and "," in operands else ""
            is_wait, is_arrival = "TRYWAIT" in name, name.startswith("SYNCS.ARRIVE")
            short = "TRYWAIT" if is_wait else "ARRIVE" if is_arrival else name.split(".")[0]
            found.append(f"WAIT{limit}" if name.startswith("WARPGROUP.DEPBAR") else f"{short}{limit}")
    return found


def loops_of_amd(code: str) -> list[list[str]]:
    """The instructions of the innermost loops of assembly for AMD's GPUs."""
    lines = [line.strip() for line in code.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    branches = ((i, re.match(r"s_c?branch\w*\s+(\.LBB\w+)", line)) for i, line in enumerate(lines))
    loops = [(labels[x[1]], i) for i, x in branches if x and labels[x[1]] < i]
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [lines[first : last + 1] for first, last in sorted(inner)]


def lost(code: str, expected: tuple[Loop, ...]) -> list[str]:
    """What is not so in disassembled code."""
    loops = [names(loop) for loop in innermost_loops(code)]
    found = []
    for each in expected:
        own = [x for x in loops if each.has in x and not (each.without and each.without in x)]
        if len(own) != each.count:
            found.append(f"{len(own)} loops have {each.has}, not {each.count}")
        for loop in own:
            parts: list[list[str]] = [[]]
            for name in loop:
                parts[-1].append(name)
                if name.startswith(each.mark):
                    parts.append([])
            if len(parts) != each.parts:
                found.append(f"a loop with {each.has} has {len(parts) - 1} {each.mark}, not {each.parts - 1}")
                continue
            for words, part, name, least, most in each.statements:
                count = sum(x.startswith(name) for x in parts[part])
                if not least <= count <= most:
                    found.append(f"{words}: {count} {name} in part {part} of a loop, not {least} to {most}")
    return found


def changed(launched: Any, folder: Path, *pairs: str) -> Any:
    """A launched kernel of a changed copy of its module, with some parts of the text replaced by others."""
    kernel = launched.recipe.kernel
    text = Path(kernel.function.fn.__code__.co_filename).read_text()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "changed.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = dataclasses.replace(kernel, function=getattr(module, kernel.name))
    return dataclasses.replace(launched, recipe=dataclasses.replace(launched.recipe, kernel=own))
