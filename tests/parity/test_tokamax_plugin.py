"""attnops-tokamax with tokamax itself: its XLA implementation, and its kernel for Hopper as JAX lowers it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import tokamax
from absl import flags
from tokamax._src import gpu_utils

from attnops import OperationMetadata
from attnops.masks import Causal
from attnops_testing.runner import Status, Subject
from attnops_tokamax import MosaicAttention, operation

flags.FLAGS.mark_as_parsed()  # tokamax would take pytest's command line for its own

FEATURES = ("GQA", "T < S", "T > S", "T = 1", "odd lengths", "Causal", "softmax_scale", "soft cap")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A machine that says that it has an H100."""
    monkeypatch.setattr(operation, "capability", lambda: 9.0)
    monkeypatch.setattr(gpu_utils, "_compute_capability", lambda device=None: 9.0)
    monkeypatch.setattr(gpu_utils, "has_mosaic_gpu_support", lambda device=None: True)


def test_its_calls_mean_the_same_to_tokamax(monkeypatch) -> None:
    attend = tokamax.dot_product_attention

    def on_xla(*arrays, implementation, **options):
        assert implementation == "mosaic"
        return attend(*arrays, implementation="xla", precision="highest", **options)

    monkeypatch.setattr(tokamax, "dot_product_attention", on_xla)
    subject = Subject(operation=MosaicAttention, platform="cuda")
    outcomes = [subject.check([name]) for name in FEATURES]
    assert all(outcome.status is Status.RIGHT for outcome in outcomes), outcomes


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [None, Causal(offset=0)], ids=["full", "causal"])
def test_the_kernel_is_lowered_forward_and_backward(mask, head_dim, monkeypatch) -> None:
    monkeypatch.setattr("tokamax._src.ops.attention.api.backend.get_default_device", lambda: _H100())
    op = MosaicAttention(OperationMetadata(platform="cuda", on_unsupported="error"))

    def step(q, k, v):
        out, pull_back = jax.vjp(lambda *x: op(*x, mask=mask).attention_outputs, q, k, v)
        return out, *pull_back(out)

    q, k = (jax.ShapeDtypeStruct((2, T, N, head_dim), jnp.bfloat16) for T, N in ((300, 8), (500, 2)))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    text = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=allowed)(q, k, k).mlir_module()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3  # forward, dq, and dk with dv


class _H100:
    """What tokamax asks of the default device."""

    device_kind = "NVIDIA H100 80GB HBM3"
