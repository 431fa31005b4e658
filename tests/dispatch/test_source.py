"""What holds keys and values and is not what it says: each lie is told in words, with the class's name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationOutput, OperationRegistry, PluginError, Reason, UnsupportedError, attention
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.binding import Call, bind_attention
from attnops.dispatch.request import AttentionRequest
from attnops.dispatch.source import Source, SourceRequest, SourceUse

Q, K = np.ones((1, 3, 4, 8), np.float32), np.ones((1, 5, 2, 8), np.float32)


class Use(SourceUse):
    reads, steps = "reads arrays", "appends arrays"


@dataclasses.dataclass(frozen=True)
class HeldRequest(SourceRequest):
    given: Any = ()

    def reasons(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> list[Reason]:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def use(self, operation: OperationImpl, forward: str, request: AttentionRequest) -> SourceUse:
        return Use()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held(Source):
    """Keys that are the values too."""

    key: Any
    lies: ClassVar[Mapping[str, Any]] = {}

    def bind(self, operation: OperationImpl, query: Any, options: Mapping[str, Any]) -> Call:
        call = bind_attention(operation.metadata, query, self.key, self.key, dict(options))
        source = HeldRequest(self.lies.get("reasons", ()))
        call = call._replace(request=call.request.replace(source=source), args=(call.args[0], self))
        return self.lies.get("bind", lambda call: call)(call)

    def run(self, operation: OperationImpl, forward: str, call: Call) -> OperationOutput:
        plain = bind_attention(operation.metadata, call.args[0], self.key, self.key, dict(call.options))
        request = plain.request.replace(platform=call.request.platform)
        return self.lies.get("run", lambda out: out)(operation.run(plain._replace(request=request)))

    def step(self, operation: OperationImpl, query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> Any:
        grown = Held(jnp.concatenate([self.key, key], 1))
        return self.lies.get("step", lambda *both: both)(operation(query, grown, **options), grown)


def lying(**lies: Any) -> Held:
    return jax.tree_util.register_dataclass(type("Lying", (Held,), {"lies": lies}), ["key"], [])(K)


def test_one_that_does_not_lie() -> None:
    expected = attention(Q, K, K)
    np.testing.assert_array_equal(attention(Q, Held(K)), expected)
    out, grown = OperationRegistry.create("flash").step(Q, Q[:, :, :2], None, Held(K))
    assert (out.attention_outputs.shape, grown.key.shape) == (Q.shape, (1, 8, 2, 8))


def request(**fields: Any) -> Any:
    return lambda call: call._replace(request=call.request.replace(**fields))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bind gives no call": ({"bind": lambda call: None}, "Lying.bind returned None, but must return a Call"),
    "bind gives arrays": ({"bind": lambda call: call._replace(args=(Q, K, K))}, "but must return a Call of (query,"),
    "no description": ({"bind": request(source=None)}, "Lying.bind returned a request with source=None, but must"),
    "another length": (
        {"bind": request(query_length=7)},
        "Lying.bind returned a query of shape (1, 3, 4, 8) and a request of [B, T, H, D]=(1, 7, 4, 8)"),
    "not hashable": ({"bind": request(source=HeldRequest([]))}, "Lying.bind returned a request that is not hashable"),
    "values of another size": (
        {"bind": request(value_head_dim=6)},
        "Lying.run returned attention_outputs of shape (1, 3, 4, 8), but must return [B, T, H, Dv]=(1, 3, 4, 6)"),
    "run gives an array": ({"run": lambda out: Q}, "Lying.run returned a ndarray, but must return OperationOutput"),
    "run gives bfloat16": (
        {"run": lambda out: OperationOutput(jnp.zeros(Q.shape, jnp.bfloat16))},
        "Lying.run returned attention_outputs of dtype bfloat16, but must return float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["vanilla", "auto"])
@pytest.mark.parametrize("case", WRONG)
def test_a_lie_is_told_in_words(case: str, name: str) -> None:
    lies, text = WRONG[case]
    with pytest.raises(TypeError, match=re.escape(text)):
        OperationRegistry.create(name)(Q, lying(**lies))


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (None, "HeldRequest.reasons returned None, but must return or yield attnops.Reason; return () for none"),
        (("no",), "HeldRequest.reasons gave 'no' (str), but must give attnops.Reason"),
        (KeyError("x"), "HeldRequest.reasons raised KeyError: 'x'"),
    ],
)
def test_reasons_that_are_none(reasons: Any, text: str) -> None:
    with pytest.raises(PluginError, match=re.escape(text)):
        OperationRegistry.create("vanilla")(Q, lying(reasons=reasons))
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        OperationRegistry.create("auto")(Q, lying(reasons=reasons))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda out, grown: out, "Lying.step returned (OperationOutput), but must return (OperationOutput, Source)"),
        (lambda out, grown: (grown, out), "Lying.step returned (Held, OperationOutput), but must return"),
        (lambda out, grown: (out, grown.key), "but must return (OperationOutput, Source)"),
    ],
)
def test_a_step_that_gives_anything_else(step: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        OperationRegistry.create("vanilla").step(Q, Q[:, :, :2], None, lying(step=step))
