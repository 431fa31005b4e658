"""What limits may hold, and how their reasons read."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from attnops import AttentionRequest, Limits, OperationMetadata
from attnops.biases import ALiBi
from attnops.masks import (
    Ancestors,
    Causal,
    Chunked,
    Dense,
    Full,
    KeyPadding,
    Lengths,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from attnops.operations.vanilla import VanillaAttention

REQUEST = AttentionRequest(
    batch=1, query_length=4, key_length=4, heads=2, kv_heads=2, head_dim=8, value_head_dim=8
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mask_kinds": {"causal"}}, "mask_kinds names 'causal', which is not a class or operator of masks"),
        ({"mask_kinds": {"causal"}}, "did you mean 'Causal'"),
        ({"mask_kinds": {"Causal", "And"}}, "mask_kinds names 'And', which is not a class or operator of masks"),
        ({"mask_kinds": {"And"}}, "did you mean '&'?"),
        ({"mask_kinds": {"zzz"}}, "known are ['&', "),
        ({"mask_kinds": "Causal"}, "mask_kinds='Causal' must be a collection, such as {'Causal'}"),
        ({"bias_kinds": {"alibi"}}, "did you mean 'ALiBi'?"),
        ({"dtypes": "bfloat16"}, "dtypes='bfloat16' must be a collection, such as {'bfloat16'}"),
        ({"dtypes": ["float33"]}, "dtypes names 'float33', which is not a dtype; use float32, bfloat16, float16"),
        ({"max_head_dim": "128"}, "max_head_dim='128' must be an int of at least 1; leave it out for any"),
        ({"max_head_dim": 0}, "max_head_dim=0 must be an int of at least 1; leave it out for any"),
    ],
)  # fmt: skip
def test_a_field_that_would_never_match_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Limits(**fields)


def test_every_kind_of_the_contract_is_known() -> None:
    masks = (
        (Causal() & SlidingWindow(1, 0)) | ~Segments(np.zeros((1, 4), np.int32)) | Chunked(2) | PrefixLM(1) | Full()
        | Lengths(np.array([2])) | KeyPadding(np.ones((1, 4), bool)) | Dense(np.ones((1, 1, 4, 4), bool))
        | MaskFn(lambda b, h, q, k: q >= k) | Causal().at(np.arange(4), np.arange(4))
        | Ancestors([-1, 0, 0, 1])
    )  # fmt: skip
    kinds = masks.kinds()
    assert Limits(mask_kinds=kinds).mask_kinds == kinds
    assert {"&", "|", "~", "MaskFn"} <= kinds
    assert Limits(bias_kinds={"array", type(ALiBi(np.ones(2))).__name__})


@pytest.mark.parametrize(
    ("limits", "changes", "reasons"),
    [
        ({"dtypes": ["bfloat16"]}, {}, ["dtype=float32: must be one of ['bfloat16']; cast it, or set metadata.runtim"]),
        ({"dtypes": ["bfloat16"]}, {"dtypes": ("bfloat16", "float32", "float32")},
         ["key.dtype, value.dtype=float32: must be one of ['bfloat16']"]),
        ({"dtypes": ["float32"]}, {"dtypes": ("bfloat16", "float32", "float16")},
         ["query.dtype=bfloat16: must be one of ['float32']", "value.dtype=float16: must be one of ['float32']"]),
        ({"max_head_dim": 4}, {}, ["head_dim=8: must be at most 4"]),
        ({"max_head_dim": 4}, {"value_head_dim": 12}, ["head_dim=8: must be at most 4", "value_head_dim=12: must be "]),
        ({"max_head_dim": 8}, {"value_head_dim": 12}, ["value_head_dim=12: must be at most 8"]),
        ({"head_dim_multiple": 16}, {}, ["head_dim=8: must be a multiple of 16; pad it with zeros"]),
    ],
)  # fmt: skip
def test_one_fact_is_one_reason(limits: dict[str, Any], changes: dict[str, Any], reasons: list[str]) -> None:
    found = [str(reason) for reason in Limits(**limits).reasons(REQUEST.replace(**changes))]
    assert len(found) == len(reasons)
    for text, start in zip(found, reasons, strict=True):
        assert text.startswith(start)


def test_an_option_that_the_forward_does_not_name_has_one_reason() -> None:
    class NoBias(VanillaAttention):
        limits: ClassVar = {"cpu": Limits()}  # arrays alone

        def forward_cpu(self, query: Any, key: Any, value: Any, *, mask: Any = None) -> Any:
            raise NotImplementedError

    x = jnp.zeros((1, 8, 2, 4))
    operation = NoBias(OperationMetadata(platform="cpu"))
    reasons = operation.reasons(operation.request(x, x, x, bias=ALiBi(np.ones(2, np.float32))))
    assert [str(reason) for reason in reasons] == ["bias=given: forward_cpu has no such option"]


def test_modes_are_printed_as_they_are_written() -> None:
    for mode in ("train", "decode", "prefill", "insert"):
        request = REQUEST.replace(mode=mode)
        assert f" {mode} on cpu" in str(request)
        for text in (repr(request), repr(OperationMetadata(mode=mode))):
            assert f"mode='{mode}'" in text
            assert not {"__train__", "__autoregressive__", "__prefill__", "__insert__"} & set(text.split("'"))
    assert REQUEST.replace(mode="train").needs_grad
    assert not REQUEST.replace(mode="decode").needs_grad
    with pytest.raises(ValueError, match=re.escape("use one of ['decode', 'insert', 'prefill', 'train']")):
        OperationMetadata(mode="training")


def test_dtypes_may_be_given_as_dtypes() -> None:
    assert Limits(dtypes=[jnp.bfloat16]).dtypes == {"bfloat16"}
