"""sdpa: whatever it serves is right by the contract, whatever it has not is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from hypothesis import given, settings

from attnops import AttentionRequest, OperationMetadata, OperationRegistry, UnsupportedError
from attnops.operations import sdpa
from attnops.operations.sdpa import ScaledDotProductAttention
from attnops_testing.problem import FAST_COMPILE, Problem
from attnops_testing.strategies import problems
from attnops_testing.support_table import row_request

SERVED = {"mask", "bias", "softmax_scale"}


@settings(max_examples=40)
@given(problems())
def test_right_or_refused(problem):
    operation = OperationRegistry.create("sdpa", problem.metadata.replace(on_unsupported="error"))
    asked = {name for name, value in problem.options.items() if value is not None and value is not False}
    D, Dv = problem.query.shape[-1], problem.value.shape[-1]
    if asked <= SERVED and Dv == D:
        problem.check(operation, compiler_options=FAST_COMPILE)
    else:
        with pytest.raises(UnsupportedError) as caught:
            problem.run(operation)
        refused = {reason.argument for reason in caught.value.reasons}
        assert refused == (asked - SERVED) | ({"value_head_dim"} if Dv != D else set())


@draws(10, 25, problems(layouts=("BTHD",)))
def test_each_kind_of_mask_and_bias_agrees_or_is_refused(problem):
    """The draws of the test above without what sdpa refuses."""
    options = {name: value for name, value in problem.options.items() if name in SERVED}
    value = problem.key[..., ::-1]
    served = Problem(query=problem.query, key=problem.key, value=value, options=options)
    operation = OperationRegistry.create("sdpa", OperationMetadata(on_unsupported="error"))
    served.check(operation, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
def test_a_row_whose_bias_is_as_low_as_can_be(causal, lowest):
    from attnops.masks import Causal

    q, k, v = (np.random.default_rng(i).normal(size=(1, 4, 2, 8)).astype(np.float32) for i in range(3))
    bias = np.zeros((1, 1, 4, 4), np.float32)
    bias[..., 0, :] = lowest
    bias[..., 2, :3] = lowest
    options = {"bias": bias} | ({"mask": Causal()} if causal else {})
    Problem(query=q, key=k, value=v, options=options).check(OperationRegistry.create("sdpa"))


def request(**changes) -> AttentionRequest:
    return row_request("bfloat16", "cuda").replace(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtypes": ("float32",) * 3}, "dtype=float32: must be one of ['bfloat16', 'float16']"),
        ({"dtypes": ("bfloat16", "float16", "float16")}, "dtypes=bfloat16/float16/float16: query, key and value must"),
        ({"head_dim": 60, "value_head_dim": 60}, "head_dim=60: must be a multiple of 8; pad it with zeros"),
        ({"head_dim": 160, "value_head_dim": 160}, "head_dim=160: must be at most 128 for cuDNN on this GPU"),
        ({"value_head_dim": 32}, "value_head_dim=32: must equal head_dim=64"),
        ({"bias_kind": "array", "bias_dtype": "bfloat16"}, "bias=set: cuDNN's gradient of a bias is not relied on"),
        ({"bias_kind": "array", "bias_dtype": "float32", "mode": "__prefill__"}, "bias.dtype=float32: must be the"),
        (
            {"mask_kinds": frozenset({"Dense"}), "query_length": 1023},
            "T/S=1023/1024: must be even for cuDNN's backward",
        ),
        (
            {"mask": "Causal(offset=3)", "mask_kinds": frozenset({"Causal"}), "query_length": 1023, "key_length": 1023},
            "T/S=1023/1023: must be even for cuDNN's backward",
        ),
        ({"interpret": True}, "interpret=True: this kernel has no interpreter"),
        ({"options": frozenset({"sinks"}), "sinks": True}, "sinks=True: forward_cuda has no such option"),
    ],
)
def test_each_limit_of_cudnn_is_a_reason(changes, text):
    operation = ScaledDotProductAttention(OperationMetadata(platform="cuda"))
    assert not operation.reasons(request())
    reasons = [str(reason) for reason in operation.reasons(request(**changes))]
    rule = text.partition(": ")[2]
    assert reasons[0].startswith(text)
    assert all(rule in reason for reason in reasons)  # the same rule may be broken by several arguments


def test_cudnn_serves_no_gpu_before_sm_80(monkeypatch):
    """JAX does not look, and XLA's error for a T4, which is sm_75, names no GPU."""
    operation = ScaledDotProductAttention(OperationMetadata(platform="cuda"))
    monkeypatch.setattr(sdpa, "_capability", lambda: 7.5)
    assert [str(x) for x in operation.reasons(request())] == ["GPU=sm_75: must be at least sm_80 for cuDNN's attention"]
    monkeypatch.setattr(sdpa, "_capability", lambda: 9.0)
    assert not operation.reasons(request(head_dim=256, value_head_dim=256))


def test_lowers_to_cudnn():
    """The program for CUDA calls cuDNN, forward and backward; lowering needs no GPU."""
    operation = OperationRegistry.create("sdpa", OperationMetadata(platform="cuda", on_unsupported="error"))
    calls = []

    def cudnn(query, key, value, bias, mask, **options):
        calls.append((options["implementation"], options["is_causal"], bias is None, mask is None))
        return query

    from attnops.masks import Causal

    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", cudnn)
        jax.eval_shape(lambda q: operation(q, q, q, mask=Causal()), x)
        jax.eval_shape(lambda q: operation(q, q, q, mask=jnp.ones((1, 1, 1, 8), bool)), x)
    assert calls == [("cudnn", True, True, True), ("cudnn", False, True, False)]


@pytest.mark.slow
def test_any_expression_that_is_plain_causal_is_jax_nns_causal(monkeypatch):
    import jax
    import jax.numpy as jnp

    from attnops import OperationRegistry
    from attnops.masks import Band, Causal, Full, SlidingWindow

    given = []
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, **k: given.append((a[4], k["is_causal"])) or attend(*a, **k)
    )
    op = OperationRegistry.create("attnops:sdpa")
    q = jnp.ones((1, 6, 1, 4))
    plain = (Causal(), Causal() & Full(), SlidingWindow(10, 0), ~~Causal(), Band(0, None))
    for mask in plain:
        op(q, q, q, mask=mask)
    assert given == [(None, True)] * len(plain)
    op(q, q, q, mask=Causal() | ~Causal())
    assert given[-1] == (None, False)
    op(q, q[:, :5], q[:, :5], mask=Causal(offset=0))
    assert given[-1][0] is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.slow
def test_a_bias_of_another_dtype_agrees_with_vanilla_where_promotion_is_strict(dtype):
    q = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    bias = jax.random.normal(jax.random.key(1), (1, 2, 4, 4)).astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        found, expected = (OperationRegistry.create(name)(q, q, q, bias=bias) for name in ("sdpa", "vanilla"))
    np.testing.assert_allclose(found.attention_outputs, expected.attention_outputs, atol=1e-5)
