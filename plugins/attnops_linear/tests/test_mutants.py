"""The suite can fail: each mistake that is planted in the native forward is wrong in a problem of it."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

from attnops_linear import LinearAttention
from attnops_linear.testing import PROBLEMS, subject, with_state
from attnops_testing.runner import Outcome, Status

NATIVE, RULE = "operation:LinearAttention._forward", "decay by head, delta rule"


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        where: the function, "module:name".
        old: of its source.
        new: in its place.
        found_by: a problem that finds it.
    """

    where: str
    old: str
    new: str
    found_by: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the changed function in the place of the right one, wherever it is imported."""
        module, _, path = self.where.partition(":")
        owner = importlib.import_module(f"attnops_linear.{module}")
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.where} has not one {self.old!r}"
        found: dict[str, object] = {}
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(text, self.where, "exec"), function.__globals__, found)
        imported = [x for key, x in sys.modules.items() if key.startswith("attnops_linear.")]
        for place in [owner, *(x for x in imported if getattr(x, name, None) is function)]:
            monkeypatch.setattr(place, name, found[name])


MUTANTS = {
    "a token's decay is the next one's": Mutant(
        "gates:cumulative", "jnp.cumsum(coarse, axis=-2), jnp.cumsum(kept - coarse, axis=-2)",
        "jnp.cumsum(coarse, axis=-2) - coarse, jnp.cumsum(kept - coarse, axis=-2) - kept + coarse", RULE,
    ),
    "decays are summed in one float32": Mutant(
        "gates:cumulative", "coarse = lax", "coarse = 0 * lax", "decays of zero, -1e4, -150 and -inf"
    ),
    "decays have no gradient": Mutant("gates:cumulative", "(kept - coarse", "(lax.stop_gradient(kept) - coarse", RULE),
    "a reset is passed over": Mutant(
        "gates:product", "keeps = later.resets == earlier.resets", "keeps = later.resets >= 0", "documents"
    ),
    "the state misses the last token's decay": Mutant(
        "chunks:_chunk", "end = sums.tokens(C - 1, C)", "end = sums.tokens(C - 2, C - 1)", "decay by head, sums"
    ),
    "beta is ignored where keys meet": Mutant("chunks:_chunk", ", -1) * beta", ", -1)", RULE),
    "beta is ignored where values are added": Mutant("chunks:_chunk", "(beta * (value", "((value", RULE),
    "the delta rule's system is solved to first order": Mutant(
        "chunks:_chunk", "inverse(strict)", "(jnp.eye(C) - strict)", RULE
    ),
    "the delta rule does not ask the state": Mutant("chunks:_chunk", "value - past[..., C:, :]", "value", RULE),
    "a token sees those after it": Mutant(
        "chunks:_scores", "jnp.tril(jnp.ones((C, C), bool))\n", "jnp.ones((C, C), bool)\n", "decay by head, sums"
    ),
    "decays that overflow are factored": Mutant(
        "chunks:_scores", "< _MILD", "< jnp.inf", "decays of -20 and -150 by channel"
    ),
    "value heads take key heads in turn": Mutant(
        "chunks:linear_attention", "x.reshape(B, count, C, *heads, x.shape[-1])",
        "x.reshape(B, count, C, *heads[::-1], x.shape[-1]).swapaxes(3, len(heads) + 2)", RULE,
    ),
    "a step reads the state before its token": Mutant(
        "chunks:_token", " + (query * key).sum(axis=-1, keepdims=True) * value\n", "\n", "T = 1"
    ),
    "a step does not decay": Mutant("chunks:_token", "state * jnp.swapaxes(kept, -1, -2)", "state", "T = 2"),
    "the state is another row's": Mutant(
        NATIVE, "initial_state.astype(jnp.float32)", "jnp.roll(initial_state, 1, axis=0).astype(jnp.float32)", RULE
    ),
    "the scale is dropped": Mutant(NATIVE, "D**-0.5 if scale is None else scale", "D**-0.5", "scale"),
    "padding changes the state": Mutant(
        NATIVE, "x = jnp.where(is_token.reshape(B, T, *[1] * (x.ndim - 2)), x, 0)", "pass", "padding"
    ),
    **{
        f"{name} that is not finite reaches other documents": Mutant(
            "nonfinite:separate", "clean[name] = jnp.where(fine, x, 0)",
            f"clean[name] = x if name == {name!r} else jnp.where(fine, x, 0)",
            f"a document that is not finite by {name}",
        )
        for name in ("query", "key", "value", "decay", "beta", "initial_state")
    },
    "a document with NaN has other outputs": Mutant(
        "nonfinite:separate", "of_token = of_token | bad", "pass", "a document that is not finite by value"
    ),
    "the document after one with NaN is NaN": Mutant(
        "nonfinite:separate", "place, -1), axis=1) >= first", "place, -1), axis=1) >= 0",
        "a document that is not finite by beta",
    ),
    "documents are one": Mutant(
        NATIVE, "= Tokens() if mask is None else mask", "= (mask.is_token, None) if mask else Tokens()", "documents"
    ),
    "decays by channel are one": Mutant(
        NATIVE, "jnp.broadcast_to(decay, (", "jnp.broadcast_to(decay.mean(-1, keepdims=True), (",
        "decay by channel, sums",
    ),
    "the first document has no initial state": Mutant(
        "masks:_starts", "((0, 0), (1, 0)))\n    index", "((0, 0), (1, 0)), constant_values=True)\n    index",
        "documents",
    ),
    "a document that begins with padding is missed": Mutant(
        "masks:_starts", "lax.cummax(index, axis=1)", "(jnp.arange(T) + 0 * index)", "documents and padding"
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_trace_of_another_test() -> Iterator[None]:
    """JAX keeps traces by function, and so those of functions that call a changed one."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def outcome(name: str) -> Outcome:
    return subject(LinearAttention).check(with_state(PROBLEMS[name]), "jit")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.tier(every=3)
def test_a_mistake_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    found = outcome(MUTANTS[name].found_by)
    assert found.status is Status.WRONG, f"{name} is {found.status}"
    assert not found.raised, found.detail  # by its values


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({mutant.found_by for mutant in MUTANTS.values()}))
@pytest.mark.tier(every=3)
def test_what_has_no_mistake_is_right(name: str) -> None:
    found = outcome(name)
    assert found.status is Status.RIGHT, found.detail
