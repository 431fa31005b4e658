"""Each impossible input is refused with the argument, its value, the rule and what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, attention
from attnops.dispatch import registry
from attnops.masks import Causal, Segments


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


class Tensor:
    """As torch's: its dtype is none of numpy's."""

    def __init__(self, *shape):
        self.shape = shape
        self.dtype = object.__new__(type("torch.float32", (), {}))


Tensor.__module__ = "torch"
Q, K, V = ones(2, 5, 4, 8), ones(2, 7, 2, 8), ones(2, 7, 2, 6)

# fmt: off
CASES = {
    "query of rank 3": (
        (ones(5, 4, 8), K, V), {}, "query has shape (5, 4, 8), but must have rank 4: [B, length, heads, head_dim]"),
    "value of rank 5": ((Q, K, V[None]), {}, "value has shape (1, 2, 7, 2, 6), but must have rank 4"),
    "an empty dimension": (
        (Q[:, :0], K, V), {}, "query has shape (2, 0, 4, 8), but every dimension must be at least 1"),
    "heads that don't divide": (
        (ones(2, 5, 3, 8), K, V), {}, "query has 3 heads and key has 2: the kv heads must divide the heads"),
    "different kv heads": (
        (Q, K, ones(2, 7, 4, 6)), {}, "value has length 7 and 4 heads, but key has length 7 and 2 heads"),
    "different lengths": ((Q, K, V[:, :3]), {}, "value has length 3 and 2 heads, but key has length 7"),
    "different batches": ((Q, K[:1], V), {}, "key has batch 1, but query has batch 2: they must be equal"),
    "different head dims": ((Q, K[..., :3], V), {}, "key has head_dim 3, but query has head_dim 8"),
    "integers": ((Q.astype(int), K, V), {}, "query has dtype int32, but must be floating-point; cast it"),
    "float64": ((np.ones((2, 5, 4, 8)), K, V), {}, "query has dtype float64, but must be float32, bfloat16"),
    "a list": (([[1.0]], K, V), {}, "query is a list, but must be an array"),
    "a 2-D mask": (
        (Q, K, V), {"mask": np.ones((2, 7), bool)},
        "mask has shape (2, 7), but must be 4-D and broadcast to [B, H, T, S]=(2, 4, 5, 7); give a [B, S] padding "
        "mask as mask[:, None, None, :], a [T, S] mask as mask[None, None]"),
    "a 3-D mask": ((Q, K, V), {"mask": np.ones((2, 5, 7), bool)}, "give a [B, T, S] mask as mask[:, None]"),
    "a mask of other lengths": (
        (Q, K, V), {"mask": np.ones((2, 1, 5, 6), bool)},
        "mask has shape (2, 1, 5, 6): its dimension S is 6, but must be 1 or 7"),
    "an additive mask": (
        (Q, K, V), {"mask": np.zeros((1, 1, 5, 7), np.float32)},
        "mask has dtype float32, but must be boolean, True where a query may attend; give an additive mask as bias="),
    "a mask that is False": ((Q, K, V), {"mask": False}, "mask is a bool, but must be a boolean array or"),
    "sinks that are False": ((Q, K, V), {"sinks": False}, "sinks has shape (), but must have shape [H]=(4,)"),
    "a mask that is a string": ((Q, K, V), {"mask": "causal"}, "mask is a str, but must be a boolean array or"),
    "a causal offset of a wrong shape": (
        (Q, K, V), {"mask": Causal(offset=jnp.zeros(3, int))},
        "Causal's offset has shape (3,), but must be a number or have shape [B or 1, H or 1]=[2, 4]; give"),
    "a tensor of another library": (
        (Tensor(), K, V), {},
        "query is a torch.Tensor, but must be an array of JAX or numpy; convert it with jnp.from_dlpack or np.asarray"),
    "a bias of another library": ((Q, K, V), {"bias": Tensor(1, 1, 5, 7)}, "bias is a torch.Tensor, but must be"),
    "a float64 bias": ((Q, K, V), {"bias": np.zeros((1, 1, 5, 7))}, "bias has dtype float64, but must be"),
    "float64 sinks": ((Q, K, V), {"sinks": np.zeros(4)}, "sinks has dtype float64, but must be float32"),
    "return_lse that is a number": ((Q, K, V), {"return_lse": 0}, "return_lse=0 must be True or False"),
    "return_weights that is a string": ((Q, K, V), {"return_weights": "no"}, "return_weights='no' must be True or"),
    "a 2-D bias": ((Q, K, V), {"bias": ones(5, 7)}, "bias has shape (5, 7), but must be 4-D"),
    "a bias of other heads": ((Q, K, V), {"bias": ones(1, 3, 5, 7)}, "its dimension H is 3, but must be 1 or 4"),
    "a boolean bias": (
        (Q, K, V), {"bias": np.ones((1, 1, 5, 7), bool)},
        "bias has dtype bool, but must be floating-point; give a boolean mask as mask="),
    "sinks of a wrong shape": ((Q, K, V), {"sinks": ones(2)}, "sinks has shape (2,), but must have shape [H]=(4,)"),
    "no sink per head": ((Q, K, V), {"sinks": ones(4, 0)}, "shape [H]=(4,) or [H, n]: n logits per head"),
    "sinks per query": ((Q, K, V), {"sinks": ones(4, 5, 1)}, "sinks has shape (4, 5, 1), but must have shape [H]=(4,)"),
    "a scale that is NaN": (
        (Q, K, V), {"softmax_scale": float("nan")},
        "softmax_scale=nan must be finite in float32, ±3.4e+38; leave it out for head_dim ** -0.5"),
    "a scale that float32 has not": ((Q, K, V), {"softmax_scale": 1e300}, "softmax_scale=1e+300 must be finite in"),
    "a scale that is a string": ((Q, K, V), {"softmax_scale": "x"}, "softmax_scale='x' must be a number"),
    "a scale that is a numeral": ((Q, K, V), {"softmax_scale": "1"}, "softmax_scale='1' must be a number"),
    "a soft cap that is a flag": ((Q, K, V), {"logits_soft_cap": True}, "logits_soft_cap=True must be a number"),
    "a negative soft cap": ((Q, K, V), {"logits_soft_cap": -1}, "logits_soft_cap=-1.0 must be positive, from 1e-30"),
    "a soft cap that float32 has not": ((Q, K, V), {"logits_soft_cap": 1e39}, "logits_soft_cap=1e+39 must be positive"),
    "a soft cap that divides to infinity": ((Q, K, V), {"logits_soft_cap": 1e-42}, "from 1e-30 to 1e+30; leave it out"),
    "an unknown mode": ((Q, K, V), {"mode": "eval"}, "mode='eval' is not a runtime mode; use one of"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operation", ["vanilla", "sdpa", "auto"])
def test_an_impossible_call_is_refused_with_the_argument(name, operation):
    arrays, options, text = CASES[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        OperationRegistry.create(operation)(*arrays, **options)


HEADS_FIRST = ones(1, 4, 5, 8), ones(1, 2, 7, 8), ones(1, 2, 7, 8)
ONE_LENGTH = (ones(1, 4, 6, 8),) * 3  # fits both layouts


@pytest.mark.parametrize("call", [OperationRegistry.create("vanilla"), OperationRegistry.create("auto"), attention])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (HEADS_FIRST, {}),
        (HEADS_FIRST, {"mask": Causal()}),
        (ONE_LENGTH, {"mask": np.ones((1, 1, 6, 6), bool)}),
        (ONE_LENGTH, {"mask": Segments(np.zeros((1, 6), int)), "mode": "train"}),
        (ONE_LENGTH, {"sinks": ones(4)}),
        (ONE_LENGTH, {"bias": ones(1, 4, 6, 6)}),
    ],
)
def test_an_error_of_arrays_that_fit_the_other_layout_names_it(call, arrays, options):
    hint = re.escape(". If the arrays are [B, heads, length, head_dim]: OperationMetadata(layout='BHTD')")
    with pytest.raises(ValueError, match=hint):
        call(*arrays, **options)
    back = re.escape(". If the arrays are [B, length, heads, head_dim]: OperationMetadata(layout='BTHD')")
    swapped = [np.swapaxes(x, 1, 2) for x in map(np.asarray, arrays)]
    with pytest.raises(ValueError, match=back):
        attention(*swapped, **options, metadata=OperationMetadata(layout="BHTD"))


@pytest.mark.parametrize("options", [{"sinks": ones(5)}, {"mask": np.ones((6, 6), bool)}, {"softmax_scale": "x"}])
def test_an_error_that_the_other_layout_does_not_mend_names_none(options):
    with pytest.raises(ValueError, match="must") as caught:
        attention(*ONE_LENGTH, **options)
    assert "layout" not in str(caught.value)


def test_arrays_of_another_rank_in_the_layout_bhtd():
    with pytest.raises(ValueError, match=re.escape("query has shape (4, 8), but must have rank 4: [B, heads, length")):
        OperationRegistry.create("vanilla", OperationMetadata(layout="BHTD"))(ones(4, 8), K, V)


def test_dropout_needs_a_key_to_train():
    operation = OperationRegistry.create("vanilla", OperationMetadata(dropout_prob=0.3))
    with pytest.raises(ValueError, match=r"dropout_prob=0.3 needs dropout_key=jax.random.key\(...\) in train mode"):
        operation(Q, K, V)
    with pytest.raises(ValueError, match="must be one PRNG key"):
        operation(Q, K, V, dropout_key=jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match="must be one PRNG key"):
        operation(Q, K, V, dropout_key=7)
    plain = OperationRegistry.create("vanilla")(Q, K, V).attention_outputs
    np.testing.assert_array_equal(operation(Q, K, V, mode="prefill").attention_outputs, plain)


def test_a_traced_scale_is_refused():
    operation = OperationRegistry.create("vanilla")
    with pytest.raises(ValueError, match="softmax_scale is a traced array, but must be a number known when tracing"):
        jax.jit(lambda s: operation(Q, K, V, softmax_scale=s))(0.5)


@pytest.mark.parametrize("off", [None, False, np.False_])
def test_a_flag_that_is_off_is_not_set(off):
    operation = OperationRegistry.create("vanilla")
    assert operation.request(Q, K, V, return_lse=off, return_weights=off).options == frozenset()


def test_a_misspelt_option_is_refused_with_the_near_one():
    with pytest.raises(TypeError, match=r"has no option 'soft_cap'; it has \['bias', 'dropout_key', 'logits_soft_cap'"):
        OperationRegistry.create("vanilla")(Q, K, V, soft_cap=3.0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dropout_prob": 1.0}, "dropout_prob=1.0 must lie in [0, 1)"),
        ({"dropout_prob": -0.1}, "dropout_prob=-0.1 must lie in [0, 1)"),
        ({"dropout_prob": float("nan")}, "dropout_prob=nan must lie in [0, 1)"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf must be finite"),
        ({"logits_soft_cap": 0}, "logits_soft_cap=0.0 must be positive"),
        ({"platform": "gpux"}, "platform='gpux' is unknown; use one of ['cpu', 'cuda', 'rocm', 'tpu', 'tt', 'gpu']"),
        ({"layout": "THBD"}, "layout='THBD' must be 'BTHD', 'BHTD' or 'THD'"),
        ({"on_unsupported": "warn"}, "on_unsupported='warn' must be 'native' or 'error'"),
        ({"platform": 3}, "platform=3 is unknown; use one of"),
        ({"runtime_dtype": "int32"}, "runtime_dtype=int32 must be a floating-point dtype"),
        ({"runtime_dtype": "float64"}, "runtime_dtype=float64, but must be float32, bfloat16 or float16"),
        ({"runtime_dtype": "floaty"}, "runtime_dtype='floaty' is not a dtype; use float32, bfloat16 or float16"),
        ({"precision": "exact"}, "precision='exact' must be a jax.lax.Precision, or the name of one: ['default'"),
        ({"mode": "eval"}, "mode='eval' is not a runtime mode"),
        ({"block_q": 0}, "block_q=0 must be a positive int"),
        ({"block_k": True}, "block_k=True must be a positive int"),
    ],
)
def test_impossible_metadata_is_refused_with_the_field(fields, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        OperationMetadata(**fields)


def test_an_unknown_operation_lists_near_names_or_what_to_install(monkeypatch):
    with pytest.raises(ValueError, match=r"impl_name='vanila' is not an installed operation.*did you mean 'vanilla'\?"):
        OperationRegistry.create("vanila")
    monkeypatch.setitem(registry.ELSEWHERE, "paged", "attnops-paged")
    with pytest.raises(ValueError, match="pip install attnops-paged"):
        OperationRegistry.create("paged")
    with pytest.raises(ValueError, match="platform='abacus' is unknown"):
        OperationRegistry.get("vanilla", "abacus")
