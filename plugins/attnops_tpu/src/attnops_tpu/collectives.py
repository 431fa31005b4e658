"""The transfers of a program for several TPUs, and whether kernels overlap them: its instructions in scheduled order.

    compiled, program = scheduled(jax.jit(f).trace(...).lower(lowering_platforms=("tpu",)), "v5p")
    for events in exchanges(program).values():
        print(" ".join(map(str, events)))

A transfer begins at its "start" and has ended at its "done"; instructions in between overlap it.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from attnops_tpu.generations import target

if TYPE_CHECKING:
    import jax

_HEAD: Final = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME: Final = re.compile(r"^(?:ROOT )?%([\w.\-]+) = ")
_COLLECTIVE: Final = re.compile(
    r" ((?:collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter))(-start|-done)?\(%?([\w.\-]+)"
)
_CALLED: Final = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
# In the line of every instruction that runs a kernel.
KERNEL: Final = 'custom_call_target="tpu_custom_call"'


class Event(NamedTuple):
    """An instruction.

    Attributes:
        kind: ``"start"`` or ``"done"`` of a transfer, ``"whole"`` for a synchronous transfer, or ``"kernel"``.
        what: the collective operation; the kernel's name, or that of the instruction that runs kernels.
        name: the transfer's name, the same at its start and its end.
    """

    kind: str
    what: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


def scheduled(lowered: jax.stages.Lowered, generation: str) -> tuple[jax.stages.Compiled, str]:
    """A lowered program compiled for TPUs, and its instructions as text, in the order in which they run.

    Args:
        lowered: a `jax.stages.Lowered` for ``"tpu"``, placed on `attnops_tpu.aot.devices`.
        generation: the generation of these devices.

    Returns:
        The `jax.stages.Compiled`, and the text; its ``as_text`` lacks the order of asynchronous operations.
    """
    with tempfile.TemporaryDirectory(prefix="attnops_") as folder, target(generation):
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        text = max(Path(folder).glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
        return compiled, text.read_text()


def exchanges(program: str) -> dict[str, list[Event]]:
    """For each computation with a transfer, such as a loop's body: its transfers and kernels, in order.

    Args:
        program: the text of the compiled program, from `scheduled`.
    """
    bodies = computations(program)

    @functools.cache
    def computes(computation: str) -> bool:
        """Whether a computation, or one that it calls, runs a kernel."""
        return any(KERNEL in line or any(map(computes, _called(line))) for line in bodies.get(computation, ()))

    def event(line: str) -> Event | None:
        named = _NAME.match(line)
        if named is None:
            return None
        collective = _COLLECTIVE.search(line)
        if collective:
            what, phase, operand = collective.groups()
            return Event((phase or "-whole")[1:], what, operand if phase == "-done" else named[1])
        if KERNEL in line or any(map(computes, _called(line))):
            return Event("kernel", named[1].split(".")[0], named[1])
        return None

    events = {name: [e for line in lines if (e := event(line))] for name, lines in bodies.items()}
    return {name: some for name, some in events.items() if any(e.kind != "kernel" for e in some)}


def exposed(events: list[Event]) -> list[Event]:
    """The transfers, by their starts, that no kernel overlaps, so that a device waits for them.

    Args:
        events: the events of one computation, from `exchanges`.
    """
    waits = []
    for i, event in enumerate(events):
        if event.kind == "whole":
            waits.append(event)
        if event.kind == "start":
            end = next(j for j, e in enumerate(events) if e.kind == "done" and e.name == event.name)
            if not any(e.kind == "kernel" for e in events[i:end]):
                waits.append(event)
    return waits


def computations(program: str) -> dict[str, list[str]]:
    """The instructions of each computation, one line per instruction."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = bodies[head[1]] = []
        else:
            lines.append(line.strip())
    return bodies


def _called(line: str) -> list[str]:
    return [name.strip(" %") for names in _CALLED.findall(line) for name in names.split(",") if name.strip()]
