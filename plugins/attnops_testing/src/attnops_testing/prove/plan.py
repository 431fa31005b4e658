"""The steps of `attnops prove`: first launches first, and the smallest of them first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attnops.dispatch.forwards import forward_for
from attnops.dispatch.plugins import CORE
from attnops.dispatch.registry import OperationRegistry
from attnops_testing.bench import PEERS, missing_peers
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


def plan(platform: str, operations: Sequence[str], every: bool, limit: float | None) -> list[Step]:
    """The steps for these operations on a platform.

    Args:
        platform: the platform of this machine's device.
        operations: names; empty for those with a kernel for the platform, and the core's `flash` if there are none.
        every: whether each feature is checked alone too, as `attnops check --all` does.
        limit: seconds for a check; None for 60 on CPUs and 240 on accelerators.

    Raises:
        ValueError: no operation has one of the names, or one computes no softmax attention.
    """
    names = [_canonical(name, platform) for name in operations] or kernels(platform)
    seconds = limit or (_CPU_SECONDS if platform == "cpu" else _SECONDS)
    return [*_checks(names, every, seconds), *_times(platform, names, seconds)]


def kernels(platform: str) -> list[str]:
    """``distribution:operation`` of softmax attention with a kernel for the platform outside of the core; the core's
    `flash` if there are none.
    """
    found = [
        plugin.name
        for plugin in OperationRegistry.plugins(load=True)
        if (cls := plugin.operation_class) is not None
        and plugin.distribution != CORE
        and cls.computes == "attention"
        and forward_for(cls, platform) != "native"
    ]
    return found or [f"{CORE}:flash"]


def _canonical(name: str, platform: str) -> str:
    """``distribution:operation`` of a name."""
    cls = OperationRegistry.get(name, platform)
    if cls.computes != "attention":
        raise ValueError(f"operation {name!r} computes {cls.computes!r}, but softmax attention is proven: leave it out")
    return next((plugin.name for plugin in OperationRegistry.plugins() if plugin.operation_class is cls), name)


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


def _times(platform: str, names: Sequence[str], seconds: float) -> Iterator[Step]:
    missing = missing_peers()
    peers = [name for name, peer in PEERS.items() if peer not in missing]
    others = [name for name in ("sdpa",) if name not in names]
    for case in timed_cases(platform):
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
