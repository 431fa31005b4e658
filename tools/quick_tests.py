"""Prints which quick test covers each feature of the contract on each backend; fails if one has none.

A quick test is one that `make test` runs. A backend whose distribution is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRITON = "plugins/attnops_triton/tests/flash"

# By operation, as a conformance class names it: the backend, its package, and the file of the class.
BACKENDS = {
    "vanilla": ("vanilla", "attnops", "tests/operations/test_conformance.py"),
    "sdpa": ("sdpa", "attnops", "tests/operations/test_conformance.py"),
    "attnops:flash": ("native flash", "attnops", "tests/operations/test_conformance.py"),
    "ring": ("ring", "attnops_ring", "plugins/attnops_ring/tests/test_conformance.py"),
    "attnops-cpu:flash": ("C++", "attnops_cpu", "plugins/attnops_cpu/tests/flash/test_conformance.py"),
    "attnops-tpu:flash": (
        "TPU, interpreted", "attnops_tpu", "plugins/attnops_tpu/tests/flash/test_conformance.py"
    ),
    "attnops-triton:flash": ("Triton, interpreted", "attnops_triton", f"{TRITON}/test_conformance.py"),
}  # fmt: skip
# Further kinds of tests that must be quick: the package, and the test.
KINDS = {
    "compiled for a TPU": (
        "attnops_tpu",
        "plugins/attnops_tpu/tests/flash/test_compile.py::test_a_case_compiles_with_temporaries_linear_in_tokens",
    ),
    "compiled for a GPU": (
        "attnops_triton",
        f"{TRITON}/test_compile.py::test_variants_of_the_table_fit_and_use_tensor_cores",
    ),
    "several devices": ("attnops", "tests/partition/test_boundary.py::test_flash_on_three_axes_agrees_with_the_oracle"),
    "several processes": (
        "attnops_ring",
        "plugins/attnops_ring/tests/test_processes.py::test_processes_agree_with_one",
    ),
}


class Collected:
    """A pytest plugin that keeps the collected tests."""

    items: list[pytest.Item]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collect() -> list[pytest.Item]:
    """The quick tests of the files above.

    Raises:
        SystemExit: they can't be collected.
    """
    collected = Collected()
    installed = [name for _, package, name in BACKENDS.values() if importlib.util.find_spec(package)]
    installed += [name.partition("::")[0] for package, name in KINDS.values() if importlib.util.find_spec(package)]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    options = ["--collect-only", "-m", "not slow and not exhaustive", *quiet]
    if pytest.main(
        [*options, "--rootdir", str(ROOT), *(str(ROOT / name) for name in dict.fromkeys(installed))], [collected]
    ):
        raise SystemExit("the quick tests can't be collected: see `pytest --collect-only`")
    return collected.items


def features_of(item: Any) -> Iterable[str]:
    """The features that a case of a conformance class checks."""
    if item.originalname not in ("test_each_feature", "test_feature", "test_sampled_pair", "test_long"):
        return ()
    case = item.callspec.params["case"]
    return [case] if isinstance(case, str) else case


def covered(items: Iterable[Any]) -> dict[str, dict[str, pytest.Item]]:
    """The first test of each feature, by operation."""
    first: dict[str, dict[str, pytest.Item]] = {name: {} for name in BACKENDS}
    for item in items:
        operation = getattr(item.cls, "operation", None)
        for feature in features_of(item) if operation in first else ():
            first[operation].setdefault(feature, item)
    return first


def missing(items: list[pytest.Item]) -> list[str]:
    """The features and kinds that no quick test covers."""
    from attnops_testing.features import FEATURES
    from attnops_testing.pairs import changing

    first = covered(items)
    lacks = []
    for operation, (backend, package, _) in BACKENDS.items():
        # Features that change nothing, such as float32, are those of every problem.
        without = [name for name in FEATURES if name in changing() and name not in first[operation]]
        if importlib.util.find_spec(package) and without:
            lacks.append(f"{backend}: {', '.join(without)}")
    ids = [item.nodeid for item in items]
    for kind, (package, test) in KINDS.items():
        if importlib.util.find_spec(package) and not any(name.startswith(test) for name in ids):
            lacks.append(f"{kind}: {test}")
    return lacks


def table(items: list[pytest.Item]) -> str:
    """Markdown: a row for each feature, with its test and its state on each backend."""
    from attnops_testing.pairs import changing

    first = covered(items)
    shown = {name: backend for name, (backend, _, _) in BACKENDS.items() if first[name]}
    lines = [f"| feature | {' | '.join(shown.values())} | test |", f"|---{'|---' * (len(shown) + 1)}|"]
    for feature in changing():
        tests = {name: first[name][feature] for name in shown if feature in first[name]}
        cells = []
        for name in shown:
            refuses = getattr(tests[name], "cls").refuses if name in tests else ()  # noqa: B009
            cells.append("no test" if name not in tests else "refused" if feature in (refuses or ()) else "right")
        names = dict.fromkeys(item.name for item in tests.values())
        lines.append(f"| {feature} | {' | '.join(cells)} | {', '.join(f'`{name}`' for name in names)} |")
    where = [f"- {backend}: `{BACKENDS[name][2]}`" for name, backend in shown.items()]
    return "\n".join([*where, "", *lines])


if __name__ == "__main__":
    quick = collect()
    print(table(quick))
    if lacking := missing(quick):
        sys.exit("\n".join(["no quick test:", *lacking]))
