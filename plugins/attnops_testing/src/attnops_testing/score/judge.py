"""The verdict on what a library's attention did with a case."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from attnops_testing import oracle
from attnops_testing.score.cases import Array, Case, Expected
from attnops_testing.tolerance import assert_close


class Verdict(enum.StrEnum):
    """What a library does with a call. `CRASH`, `NAN` and `WRONG` are faults; `OPEN` is an undocumented convention."""

    RIGHT = "right"
    FORWARD = "right forward"
    CONVENTION = "convention"
    OPEN = "undocumented"
    REFUSED = "refused"
    CRASH = "crash"
    NAN = "NaN"
    WRONG = "wrong"
    NOT_RUN = "not run"


FAULTS: Final = (Verdict.CRASH, Verdict.NAN, Verdict.WRONG)
# Exceptions that say what is not served. Others show that nobody had thought of the call.
_REFUSALS: Final = frozenset({
    "Fail", "IndexError", "InvalidArgument", "NotImplemented", "NotImplementedError", "RuntimeError", "TypeError",
    "ValueError", "ExceptionGroup", "InvalidGraph", "TorchRuntimeError", "Unsupported", "TypeCheckError",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """The verdict on a case, and why."""

    verdict: Verdict
    detail: str = ""


def judge(case: Case, ending: dict[str, Any], results: dict[str, Array], documented: Collection[str] = ()) -> Row:
    """The verdict on how a case ended.

    Args:
        case: the case.
        ending: what the worker wrote of it.
        results: the arrays that it wrote.
        documented: the conventions that the library documents; others are `OPEN`.
    """
    if ending["ending"] in ("crash", "not run"):
        return Row(Verdict(ending["ending"]), ending["message"])
    if ending["ending"] == "raised":
        return Row(Verdict.RIGHT) if case.kind == "refusal" else _judge_error(ending)
    if ending["ending"] == "refused":
        return Row(Verdict.REFUSED, ending["message"])
    if case.kind == "refusal":
        return Row(Verdict.WRONG, "it computes something and says nothing")
    if case.kind == "dropout":
        return _judge_dropout(case, results, documented)
    truth, conventions = case.truth()
    different = _differs(case, truth, results)
    if not different:
        empty = _empty_rows(case, results["out"])
        if empty:
            return _convention(f"rows that see no key are {empty}", documented)
        if "forward" not in ending:
            return Row(Verdict.RIGHT)
        error = _judge_error(ending["forward"])
        return Row(Verdict.FORWARD if error.verdict is Verdict.REFUSED else Verdict.CRASH, f"gradients: {error.detail}")
    for name, expected in conventions.items():
        if not _differs(case, expected, {x: results[x] for x in results if x in expected}):
            return _convention(name, documented)
    if "is nan" in different:
        return _convention(case.nan, documented) if case.nan else Row(Verdict.NAN, different)
    return Row(Verdict.WRONG, different)


def _convention(name: str, documented: Collection[str]) -> Row:
    return Row(Verdict.CONVENTION if name in documented else Verdict.OPEN, name)


def _judge_error(error: dict[str, Any]) -> Row:
    place = f" ({error['place']})" if "place" in error else ""
    refused = error["type"] in _REFUSALS or (error["type"] == "AssertionError" and error["message"])
    text = f"{error['type']}: {' '.join(error['message'].split())[:300]}{place}"
    return Row(Verdict.REFUSED if refused else Verdict.CRASH, text)


def _differs(case: Case, expected: Expected, results: dict[str, Array]) -> str:
    """How the results differ from what is expected; the first that is NaN, or the first. Empty where none does."""
    texts = []
    for name, (exact, allowed) in expected.items():
        if name not in results:
            if name.startswith("gradient") or name.startswith("second"):
                continue  # forward alone
            texts.append(f"it returns no {name}")
            continue
        actual = results[name]
        seen = {"out": case.seen[..., None], "lse": case.seen.swapaxes(1, 2)}.get(name)
        if seen is not None and actual.shape == exact.shape:
            actual = np.where(seen, actual, exact)
        try:
            assert_close(name, actual, exact, allowed)
        except AssertionError as error:
            texts.append(str(error))
    first = next((text for text in texts if "is nan" in text), texts[0] if texts else "")
    return f"{first}; {len(texts) - 1} more results are off" if len(texts) > 1 else first


def _empty_rows(case: Case, out: Array) -> str:
    """What is in rows that see no key; empty for zeros."""
    rows = out[~case.seen]
    if not rows.any():
        return ""
    if np.isnan(rows).all():
        return "NaN"
    v = case.arrays["value"]
    mean = np.repeat(v.mean(axis=1), out.shape[2] // v.shape[2], axis=1)[:, None] + np.zeros_like(out)
    return "the mean of all values" if np.allclose(rows, mean[~case.seen], atol=1e-2) else "other numbers"


def _judge_dropout(case: Case, results: dict[str, Array], documented: Collection[str]) -> Row:
    """Each weight, which values that are a unit matrix show, is dropped or divided by the probability to keep it."""
    prob, weights = case.options["dropout"], case.truth()[0]["out"][0]
    keep = (results["out"] != 0).swapaxes(1, 2)
    if keep.all():
        return Row(Verdict.WRONG, "no weight is dropped")
    n = case.arrays["query"].shape[1] * weights.shape[-1]  # one mask may serve all heads and rows
    if abs(keep.mean() - (1 - prob)) > 6 * (prob * (1 - prob) / n) ** 0.5:
        return Row(Verdict.WRONG, f"{1 - keep.mean():.2f} of the weights are dropped, with a probability of {prob}")
    arrays = case.arrays
    qkv = [arrays[name] for name in ("query", "key", "value")]
    eps = 1e-2 if case.dtype != "float32" else 1e-5

    def differs(**options: Any) -> str:
        found = {"out": oracle.attention(*qkv, **options).out}
        gradients = oracle.attention_gradients(*qkv, d_out=arrays["d_out"], **options).values
        found |= {f"gradient of {name}": x for name, x in gradients.items()}
        return _differs(case, {name: (x, eps * float(np.abs(x).max())) for name, x in found.items()}, results)

    if not (different := differs(keep=keep, dropout_prob=prob)):
        return Row(Verdict.RIGHT)
    if not differs(mask=keep):
        return _convention("keys are dropped before the softmax, whose other weights sum to 1", documented)
    return Row(Verdict.WRONG, different)
