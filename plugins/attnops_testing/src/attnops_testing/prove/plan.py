"""The steps of `attnops prove`: first launches first, and the smallest of them first."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attnops.dispatch.forwards import forward_for
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.plugins import CORE
from attnops.dispatch.registry import OperationRegistry
from attnops_testing.bench import PEERS
from attnops_testing.prove.cases import timed_cases
from attnops_testing.prove.step import Step
from attnops_testing.suite import SUITE

FIRST: Final = "First calls"
TIMES: Final = "Times"

# Seconds for a check: a kernel's compiler and a device's first call need more on accelerators.
_CPU_SECONDS, _SECONDS = 60.0, 240.0
# Over caches only in mode "decode", and on arrays without and with a backward pass.
_FIRST: Final = (
    ("forward", "feature", (), "prefill"), ("forward and backward", "feature", (), "train"),
    ("one token over a cache", "caches", (), "prefill"), ("one token over pages", "caches", ("paged",), "prefill"),
    ("packed rows over pages", "caches", ("19 queries", "paged", "packed rows", "op.step"), "prefill"),
)  # fmt: skip
_PARTS: Final = {
    "Features": ("each_feature",), "Caches": ("caches",), "Behaviours": ("behaviour", "memory_growth"),
}  # fmt: skip
_ALL: Final = {
    "Features": ("feature",), "Long problems": ("long",), "Caches": ("caches",),
    "Pairs of features": ("sampled_pair",), "Behaviours": ("behaviour", "memory_growth"),
}  # fmt: skip
# On accelerators, in problems of several tiles too, whose dtype and head dims kernels of their own may serve.
_HALF: Final = "bfloat16"
_HEAD_DIMS: Final = (64, 128)
_CACHE_HEAD_DIMS: Final = (128,)
# On a CPU one in so many of their problems is checked: each compiles for some 15 seconds.
_CPU_SHARE: Final = 3
# Suites of other contracts than attention: the section, and the module with `PROBLEMS` and `check`.
_OTHERS: Final = {"linear_attention": ("Linear attention", "attnops_linear.testing")}


def plan(platform: str, operations: Sequence[str], every: bool, limit: float | None) -> list[Step]:
    """The steps for these operations on a platform.

    Args:
        platform: the platform of this machine's device.
        operations: names; empty for those of each contract with a kernel for the platform, and the native one if there
            are none.
        every: whether each feature is checked alone too, as `attnops check --all` does.
        limit: seconds for a check; None for 60 on CPUs and 240 on accelerators.

    Raises:
        ValueError: no operation has one of the names, or what one computes has no suite.
    """
    seconds = limit or (_CPU_SECONDS if platform == "cpu" else _SECONDS)
    contracts = [ATTENTION, *_OTHERS]
    named = [_canonical(name, platform, contracts) for name in operations]
    found = {c: [name for of, name in named if of == c] if named else kernels(platform, c) for c in contracts}
    share = 1 if every or platform != "cpu" else _CPU_SHARE
    steps = [step for contract in _OTHERS for step in _others(contract, found[contract], every, share, seconds)]
    if names := found[ATTENTION]:
        half = () if platform == "cpu" else _checks_in_half(names, every, seconds)
        return [*_checks(names, every, seconds), *half, *steps, *_times(platform, names, seconds)]
    return steps


def kernels(platform: str, contract: str = ATTENTION) -> list[str]:
    """``distribution:operation`` of a contract with a kernel for the platform outside of the core; if there are none,
    the class that the others extend, of attention the core's `flash`.
    """
    found = {
        plugin.name: cls
        for plugin in OperationRegistry.plugins(load=True)
        if (cls := plugin.operation_class) is not None and plugin.distribution != CORE and cls.computes == contract
    }
    native = [f"{CORE}:flash"] if contract == ATTENTION else sorted(found, key=lambda x: len(found[x].__mro__))[:1]
    return [name for name, cls in found.items() if forward_for(cls, platform) != "native"] or native


def _canonical(name: str, platform: str, contracts: Sequence[str]) -> tuple[str, str]:
    """The contract, and ``distribution:operation``, of a name."""
    cls = OperationRegistry.get(name, platform)
    if cls.computes is None or cls.computes not in contracts:
        raise ValueError(f"operation {name!r} computes {cls.computes!r}, which has no suite here: leave it out")
    found = (plugin.name for plugin in OperationRegistry.plugins() if plugin.operation_class is cls)
    return cls.computes, next(found, name)


def absent_peers(platform: str) -> dict[str, str]:
    """Why each peer can't be measured on a platform; empty if it can."""
    return {name: peer.absent(platform) for name, peer in PEERS.items()}


def _checks(names: Sequence[str], every: bool, seconds: float) -> Iterator[Step]:
    def step(section: str, name: str, operation: str, part: str, case: Any, mode: str = "train") -> Step:
        arguments = {"operation": operation, "part": part, "case": case, "mode": mode}
        return Step(section, f"{operation}: {name}", "check", arguments, seconds)

    for what, part, case, mode in _FIRST:
        for operation in names:
            yield step(FIRST, what, operation, part, case, mode)
    for section, parts in (_ALL if every else _PARTS).items():
        for name in parts:
            for case in SUITE[name].cases:
                if every or SUITE[name].quick(case, False):
                    for operation in names:
                        yield step(section, SUITE[name].name(case), operation, name, case)


def _checks_in_half(names: Sequence[str], every: bool, seconds: float) -> Iterator[Step]:
    """Every feature, and every feature over caches, in bfloat16."""
    features, caches = (*_HEAD_DIMS, 256) if every else _HEAD_DIMS, _CACHE_HEAD_DIMS
    for section, part, head_dims in (("Features", "each_feature", features), ("Caches", "caches", caches)):
        for head_dim in head_dims:
            for case in SUITE[part].cases:
                for operation in names:
                    arguments = {"operation": operation, "part": part, "case": case, "mode": "train"}
                    yield Step(
                        f"{section} in {_HALF}", f"{operation}: D {head_dim}, {SUITE[part].name(case)}", "check",
                        {**arguments, "dtype": _HALF, "head_dim": head_dim}, seconds,
                    )  # fmt: skip


def _others(contract: str, names: Sequence[str], every: bool, share: int, seconds: float) -> Iterator[Step]:
    """The problems of another contract's suite, or one in ``share``, if its distribution is installed."""
    section, module = _OTHERS[contract]
    for problem in list(importlib.import_module(module).PROBLEMS)[::share] if names else ():
        for name in names:
            arguments = {"module": module, "operation": name, "problem": problem, "every": every}
            yield Step(section, f"{name}: {problem}", "check_problem", arguments, 2 * seconds)  # to compile


def _times(platform: str, names: Sequence[str], seconds: float) -> Iterator[Step]:
    present = [PEERS[name] for name, reason in absent_peers(platform).items() if not reason]
    others = [name for name in ("sdpa",) if name not in names]
    for case in timed_cases(platform):
        peers = [peer.name for peer in present if (peer.adapt_cache if case.cache else peer.adapt) is not None]
        contenders = [*names, *others, *peers]
        yield Step(
            TIMES, case.name, "measure_times",
            {"case": dataclasses.asdict(case), "contenders": contenders}, seconds * (1 + len(contenders)),
        )  # fmt: skip


def alone(step: Step) -> list[Step]:
    """The steps with one contender each, for a step that crashed or hung with several."""
    contenders = step.arguments.get("contenders", [])
    if len(contenders) < 2:
        return []
    seconds = step.seconds * 2 / (1 + len(contenders))
    return [
        dataclasses.replace(
            step, name=f"{step.name}: {name} alone", arguments={**step.arguments, "contenders": [name]}, seconds=seconds
        )
        for name in contenders
    ]
