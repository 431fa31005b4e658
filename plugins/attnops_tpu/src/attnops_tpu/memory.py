"""The memory of a compiled program: what kernels use of vector memory, and what moves outside of kernels.

    _, program = scheduled(jax.jit(f).trace(...).lower(lowering_platforms=("tpu",)), "v6e")
    for kernel in kernels(program):
        print(kernel.name, kernel.used, kernel.limit)
    print(outside_bytes(program))

An array that the compiler keeps in vector memory costs no transfers. `outside_bytes` divided by the bandwidth of main
memory is the least time that the program spends outside of its kernels.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from attnops_tpu.collectives import KERNEL, computations

_INSTRUCTION: Final = re.compile(r"^(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")
_ARRAY: Final = re.compile(r"\b(pred|bf16|[a-z]\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY: Final = re.compile(r"(?:body|to_apply)=%([\w.\-]+)")
_VMEM: Final = r'"{}":\[\{{"memory_space":"1","offset":"\d+","size":"(\d+)"'
# These move nothing, or are counted where the transfer starts.
_FREE: Final = frozenset(
    {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "while", "call"}
)


class KernelMemory(NamedTuple):
    """Vector memory of a kernel, in bytes.

    Attributes:
        name: the kernel's.
        limit: the most that it may use, which the compiler withholds from the arrays of the program.
        used: what its blocks, its scratch and spilled registers use.
    """

    name: str
    limit: int
    used: int


class _Array(NamedTuple):
    """An array of an instruction: its bytes, and whether it is in main memory."""

    bytes: int
    in_hbm: bool


def kernels(program: str) -> list[KernelMemory]:
    """The kernels of a program that use vector memory, in order.

    Args:
        program: the text of the compiled program, from `attnops_tpu.collectives.scheduled`.
    """
    memories = []
    for line in (line for lines in computations(program).values() for line in lines if KERNEL in line):
        named = _INSTRUCTION.match(line)
        limit, used = (
            re.search(_VMEM.format(key), line) for key in ("scoped_memory_configs", "used_scoped_memory_configs")
        )
        if named and limit and used:
            memories.append(KernelMemory(named[1].rsplit(".", 1)[0], int(limit[1]), int(used[1])))
    return memories


def outside_bytes(program: str) -> int:
    """Bytes that a program moves to and from main memory outside of its kernels.

    These are the operands and results in main memory of all instructions that are no kernels. Loops count as often as
    they run, once if that is unknown.

    Args:
        program: the text of the compiled program, from `attnops_tpu.collectives.scheduled`.
    """
    bodies = computations(program)
    return _moved(bodies, _entry(program))


def kernel_bytes(program: str) -> dict[str, int]:
    """The bytes of each kernel's operands and results in main memory, without padding, by the instruction's name.

    A kernel that reads and writes each of its blocks once moves these. Loops count once.

    Args:
        program: the text of the compiled program, from `attnops_tpu.collectives.scheduled`.
    """
    found: dict[str, int] = {}
    for lines in computations(program).values():
        arrays: dict[str, list[_Array]] = {}
        for line in lines:
            instruction = _INSTRUCTION.match(line)
            if instruction:
                name, shapes, _, operands = instruction.groups()
                arrays[name] = [_array(*matched) for matched in _ARRAY.findall(shapes)]
                if KERNEL in line:
                    given = [x for operand in re.findall(r"%([\w.\-]+)", operands) for x in arrays.get(operand, ())]
                    found[name] = sum(x.bytes for x in (*given, *arrays[name]) if x.in_hbm)
    return found


def _entry(program: str) -> str:
    match = re.search(r"^ENTRY %?([\w.\-]+) ", program, re.MULTILINE)
    if not match:
        raise ValueError("the text is no program: it has no ENTRY computation")
    return match[1]


def _moved(bodies: dict[str, list[str]], computation: str) -> int:
    arrays: dict[str, list[_Array]] = {}
    total = 0
    for line in bodies.get(computation, ()):
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        name, shapes, opcode, operands = instruction.groups()
        arrays[name] = results = [_array(*matched) for matched in _ARRAY.findall(shapes)]
        if opcode in ("while", "call"):
            trips = _TRIPS.search(line)
            total += sum(_moved(bodies, body) for body in _BODY.findall(line)) * (int(trips[1]) if trips else 1)
        if opcode in _FREE or opcode.endswith("-done") or KERNEL in line or '"ConcatBitcast"' in line:
            continue
        given = [x for operand in re.findall(r"%([\w.\-]+)", operands) for x in arrays.get(operand, ())]
        if opcode.endswith("-start"):
            # The results are the operand, or a slice of it, the copy, and a semaphore.
            source, copy = sorted(results[:2], key=lambda x: -x.bytes)
            total += copy.bytes * (source.in_hbm + copy.in_hbm)
        else:
            total += sum(x.bytes for x in (*given, *results) if x.in_hbm)
    return total


def _array(dtype: str, shape: str, layout: str) -> _Array:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return _Array(math.prod(int(n) for n in shape.split(",") if n) * bits // 8, "S(" not in layout)
