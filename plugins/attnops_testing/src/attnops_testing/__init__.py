"""Tests of operations: the float64 oracle, the tolerance rule, and the conformance suite that every plugin runs.

`OperationConformance` and `Conformance` need pytest, and `attnops_testing.strategies` hypothesis; the other modules
need neither.

Three modules list features of the contract, for different uses: `features` as small problems that are run and compared
with the oracle; `catalogue` as calls of real sizes that are only compiled; `support_table` as requests, from which the
README's table is made. `cache_features` lists the features of calls over caches.
"""

from typing import TYPE_CHECKING, Any

from attnops_testing.oracle import Gradients, Result, attention, attention_gradients, dropout_keep
from attnops_testing.problem import Problem
from attnops_testing.reference import check_against
from attnops_testing.tolerance import assert_close

if TYPE_CHECKING:
    from attnops_testing.conformance import Conformance, OperationConformance

__all__ = [
    "Conformance",
    "Gradients",
    "OperationConformance",
    "Problem",
    "Result",
    "assert_close",
    "attention",
    "attention_gradients",
    "check_against",
    "dropout_keep",
]


def __getattr__(name: str) -> Any:
    if name in ("Conformance", "OperationConformance"):
        try:
            from attnops_testing import conformance
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{name} needs {error.name}: pip install 'attnops-testing[pytest]'") from error

        return getattr(conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
