"""Operations that are no attention: their arguments, modes, limits and metadata are honoured or refused."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import (
    BaseOperation,
    Limits,
    NotDifferentiableError,
    OperationMetadata,
    OperationRegistry,
    UnsupportedError,
    UnsupportedWarning,
)

X, W = jnp.asarray([[3.0, 4.0]]), jnp.asarray([2.0, 1.0])
NORMED = np.asarray([[3.0 * 2, 4.0]]) / np.sqrt(12.5)


def rms_norm(**members: Any) -> type[BaseOperation]:
    """A norm whose forward for TPUs gives the negative, which shows that it ran."""

    class RMSNorm(BaseOperation):
        @classmethod
        def get_impl_name(cls) -> str:
            return "rms_norm"

        def forward_native(self, x: Any, weight: Any, *, eps: float = 0.0) -> Any:
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight

        def forward_tpu(self, inputs: Any, weight: Any, *, eps: float = 0.0) -> Any:
            return -self.forward_native(inputs, weight, eps=eps)

    for name, value in members.items():
        setattr(RMSNorm, name, value)
    return RMSNorm


def on_tpu(**metadata: Any) -> OperationMetadata:
    return OperationMetadata(platform="tpu", **metadata)


class TestArguments:
    @pytest.mark.parametrize("platform", ["cpu", "tpu"])
    def test_an_argument_may_be_given_by_name(self, platform: str) -> None:
        operation = rms_norm()(OperationMetadata(platform=platform))
        sign = -1 if platform == "tpu" else 1
        for found in (operation(X, weight=W), operation(weight=W, x=X), operation(X, W, eps=0.0)):
            np.testing.assert_allclose(found, sign * NORMED, rtol=1e-6)

    def test_one_that_is_missing_or_given_twice_is_named(self) -> None:
        operation = rms_norm()()
        with pytest.raises(TypeError, match=r"RMSNorm lacks its argument 'x'; its arguments are \['x', 'weight'\]"):
            operation(weight=W)
        with pytest.raises(TypeError, match="RMSNorm got its argument 'weight' twice, by position and by name"):
            operation(X, W, weight=W)
        with pytest.raises(TypeError, match=r"RMSNorm has no option 'bias'; it has \['eps', 'mode'\]"):
            operation(X, W, bias=W)


class TestMode:
    LIMITS = {"tpu": Limits(differentiable=False)}  # noqa: RUF012

    def test_a_call_may_state_it(self) -> None:
        operation = rms_norm(limits=self.LIMITS)(on_tpu(on_unsupported="error"))
        np.testing.assert_allclose(operation(X, W, mode="prefill"), -NORMED, rtol=1e-6)
        with pytest.raises(UnsupportedError) as caught:
            operation(X, W)
        (reason,) = caught.value.reasons
        assert (reason.argument, reason.value) == ("mode", "train")
        assert "without gradients, call it with mode='prefill'" in str(reason)
        assert "can't serve train on tpu:" in str(caught.value)

    @pytest.mark.slow
    def test_what_the_message_advises_works(self) -> None:
        operation = rms_norm(limits=self.LIMITS)(on_tpu())
        with pytest.raises(NotDifferentiableError, match="call it with mode='train'"):
            jax.grad(lambda x: operation(x, W, mode="prefill").sum())(X)
        with pytest.warns(UnsupportedWarning, match="mode=train: has no backward pass"):
            found = jax.grad(lambda x: operation(x, W, mode="train").sum())(X)
        expected = jax.grad(lambda x: rms_norm()()(x, W).sum())(X)
        np.testing.assert_array_equal(found, expected)

    def test_a_forward_that_names_it_gets_what_the_call_states(self) -> None:
        seen = []

        def forward_native(self: Any, x: Any, *, mode: str = "") -> Any:
            seen.append(mode)
            return x

        operation = rms_norm(forward_native=forward_native)(OperationMetadata(platform="cpu"))
        operation(X, mode="insert")
        operation(X)
        assert seen == ["__insert__", "__train__"]


class TestLimits:
    def test_dtypes_count_for_every_floating_point_argument(self) -> None:
        limits = {"tpu": Limits(dtypes=["bfloat16"], same_dtype=True)}
        operation = rms_norm(limits=limits)(on_tpu(on_unsupported="error"))
        half = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
        assert (operation(*half) < 0).all()
        with pytest.raises(UnsupportedError, match=re.escape("dtype=float32: must be one of ['bfloat16']; cast it")):
            operation(X, W)
        with pytest.raises(UnsupportedError) as caught:
            operation(half[0], W)
        assert [str(reason) for reason in caught.value.reasons] == [
            "dtype=float32: must be one of ['bfloat16']; cast it",
            "dtypes=bfloat16/float32: floating-point arguments must share one dtype; cast them",
        ]

    def test_integers_and_what_declares_no_limits_are_free(self) -> None:
        limits = {"tpu": Limits(dtypes=["bfloat16"])}
        forward = lambda self, x, weight: x  # noqa: E731
        operation = rms_norm(limits=limits, forward_tpu=forward)(on_tpu(on_unsupported="error"))
        assert operation(jnp.arange(3), jnp.arange(3)).dtype == jnp.int32
        tiny = jnp.ones(2, jnp.float8_e4m3fn)
        assert rms_norm(forward_tpu=forward)(on_tpu())(tiny, tiny) is tiny

    @pytest.mark.parametrize(
        ("limits", "fields"),
        [
            (Limits(max_head_dim=128), "max_head_dim"),
            (Limits(mask_kinds=["Causal"], bias_kinds=None), "mask_kinds, bias_kinds"),
            (Limits(linear_memory=False), "linear_memory"),
        ],
    )
    def test_those_of_attention_alone_are_refused(self, limits: Limits, fields: str) -> None:
        text = f"has limits['tpu'] with {fields}, which only a subclass of attnops.OperationImpl can declare"
        with pytest.raises(TypeError, match=re.escape(text)):
            OperationRegistry.register(rms_norm(limits={"tpu": limits}))


class TestMetadata:
    @pytest.mark.parametrize(
        ("metadata", "text"),
        [
            ({"runtime_dtype": jnp.bfloat16}, "metadata.runtime_dtype=bfloat16: RMSNorm does not read it; cast its ar"),
            ({"mesh": jax.sharding.Mesh(jax.devices()[:1], ("x",))}, "does not read it; place its arguments with jax."),
            ({"softmax_scale": 2.0}, "metadata.softmax_scale=2.0: RMSNorm does not read it; leave it out"),
            ({"layout": "BHTD"}, "metadata.layout=BHTD: RMSNorm does not read it; leave it out"),
        ],
    )  # fmt: skip
    def test_a_field_that_it_does_not_read_is_refused(self, metadata: dict[str, Any], text: str) -> None:
        operation = rms_norm()(OperationMetadata(**metadata))
        with pytest.raises(UnsupportedError, match=re.escape(text)):
            operation(X, W)
        reads = rms_norm(reads=frozenset(metadata))(OperationMetadata(**metadata))
        np.testing.assert_allclose(reads(X, W), NORMED, rtol=1e-6)

    def test_reads_names_fields(self) -> None:
        with pytest.raises(TypeError, match=r"has reads=frozenset\(\{'dtype'\}\), which must be a set of fields of Op"):
            OperationRegistry.register(rms_norm(reads=frozenset({"dtype"})))

    def test_it_does_not_compute_attention(self) -> None:
        with pytest.raises(
            TypeError, match=r"has computes='attention', but is not a subclass of attnops.OperationImpl"
        ):
            OperationRegistry.register(rms_norm(computes="attention"))
