"""Which implementation `auto` picks, by platform and kind of request, and the reason that `explain` prints."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import (
    AttentionRequest,
    OperationMetadata,
    OperationOutput,
    OperationRegistry,
    Rank,
    RankBetween,
    Reason,
    explain,
)
from attnops.biases import ALiBi
from attnops.masks import Causal, SlidingWindow
from attnops.operations.flash import FlashAttention
from attnops.operations.sdpa import ScaledDotProductAttention
from attnops.operations.vanilla import VanillaAttention

PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "tt")
# Triton is for Linux alone.
HAS_TRITON = importlib.util.find_spec("attnops_triton") is not None
LONG = 32768  # 2**32 scores with 4 heads


def asked(**given: Any) -> AttentionRequest:
    """The request of a call of 4 heads and 64 features, in bfloat16."""
    T, S, axes = given.pop("T", 128), given.pop("S", 128), given.pop("sequence_axes", ())
    dtype, Dv = given.pop("dtype", jnp.bfloat16), given.pop("Dv", 64)
    metadata = OperationMetadata(dropout_prob=0.5 if "dropout_key" in given else 0.0)
    q, k, v = (jax.ShapeDtypeStruct((1, n, 4, d), dtype) for n, d in ((T, 64), (S, 64), (S, Dv)))
    request: AttentionRequest = OperationRegistry.create("vanilla", metadata).request(q, k, v, **given)
    return request.replace(sequence_axes=axes)


ARRAY = jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.bfloat16)
CPU, GPU, TPU, SDPA = "attnops:flash", "attnops-triton:flash", "attnops-tpu:flash", "attnops:sdpa"
# By kind of request: the call, and what runs it on each of `PLATFORMS`.
PICKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, (CPU, SDPA, GPU, TPU, SDPA)),
    "float32": ({"dtype": jnp.float32}, (CPU, GPU, GPU, TPU, SDPA)),
    "float16": ({"dtype": jnp.float16}, (CPU, SDPA, GPU, CPU, CPU)),
    "causal": ({"mask": Causal()}, (CPU, SDPA, GPU, TPU, SDPA)),
    "causal, T ≠ S": ({"T": 64, "mask": Causal()}, (CPU, GPU, GPU, TPU, SDPA)),
    "window": ({"mask": Causal() & SlidingWindow(15, 0)}, (CPU, GPU, GPU, TPU, SDPA)),
    "array bias": ({"bias": ARRAY}, (CPU, GPU, GPU, TPU, SDPA)),
    "array bias, prefill": ({"bias": ARRAY, "mode": "prefill"}, (CPU, GPU, GPU, TPU, SDPA)),
    "ALiBi": ({"bias": ALiBi(jnp.ones(4))}, (CPU, GPU, GPU, TPU, CPU)),
    "soft cap": ({"logits_soft_cap": 30.0}, (CPU, GPU, GPU, TPU, CPU)),
    "dropout": ({"dropout_key": jax.random.key(0)}, (CPU, GPU, GPU, TPU, CPU)),
    "logsumexp": ({"return_lse": True}, (CPU, GPU, GPU, TPU, CPU)),
    "max logits": ({"return_max_logits": True}, (CPU, GPU, GPU, TPU, CPU)),
    "weights": ({"return_weights": True}, (CPU, CPU, CPU, CPU, CPU)),
    "decode": ({"T": 1}, (CPU, SDPA, GPU, TPU, SDPA)),
    "D ≠ Dv": ({"Dv": 32}, (CPU, GPU, GPU, TPU, CPU)),
    "2**32 scores": ({"T": LONG, "S": LONG, "mask": Causal()}, (CPU, SDPA, GPU, TPU, CPU)),
    "2**32 scores, float16": ({"T": LONG, "S": LONG, "dtype": jnp.float16}, (CPU, SDPA, GPU, CPU, CPU)),
    "sequence cut": ({"sequence_axes": ("sp",)}, ("attnops-ring:ring",) * 5),
    "sequence cut, weights": ({"sequence_axes": ("sp",), "return_weights": True}, (CPU, CPU, CPU, CPU, CPU)),
}


@pytest.mark.parametrize(("given", "picks"), PICKS.values(), ids=PICKS)
def test_auto_picks_the_first_rank_that_serves(given: dict[str, Any], picks: tuple[str, ...]) -> None:
    request = asked(**given)
    expected = {p: pick for p, pick in zip(PLATFORMS, picks, strict=True) if HAS_TRITON or p not in ("cuda", "rocm")}
    assert {p: explain(request.replace(platform=p)).chosen.name for p in expected} == expected


@pytest.fixture
def _registered() -> Iterator[None]:
    before = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = before
    OperationRegistry.refresh()


def test_explain_prints_the_rank_of_the_chosen_and_of_what_could_serve() -> None:
    lines = str(explain(asked().replace(platform="tpu"))).splitlines()
    assert lines[1:3] == ["runs attnops-tpu:flash (forward_tpu)", "  rank 5 of 11: a forward written for this platform"]
    assert lines[3].startswith("  derivatives: reverse mode by kernels; forward mode and higher orders in plain JAX")
    assert lines[4:6] == ["attnops:sdpa: could serve it", f"  {Rank.PRODUCT}"]
    # What can't serve has reasons instead.
    assert lines[lines.index("attnops-ring:ring: can't serve it") + 1].startswith("  - mesh=")


def test_explain_prints_the_rank_of_what_is_asked_for_by_name() -> None:
    found = explain(asked(), "vanilla")
    assert str(found).splitlines()[1:3] == ["runs attnops:vanilla (forward_native)", f"  {Rank.REFERENCE}"]


@pytest.mark.usefixtures("_registered")
def test_without_a_rank_auto_never_picks_it_and_explain_shows_that() -> None:
    body = {"get_impl_name": classmethod(lambda cls: "zeta"), "rank": classmethod(lambda cls, request: None)}
    OperationRegistry.register(type("Zeta", (VanillaAttention,), body | {"__module__": "acme.zeta"}))
    lines = str(explain(asked(), "zeta")).splitlines()
    assert lines[1:3] == ["runs acme:zeta (forward_native)", "  no rank: auto never picks it"]
    assert explain(asked()).chosen.name == CPU


@pytest.mark.usefixtures("_registered")
def test_a_rank_of_a_plugin_s_own_lies_between_two_others_and_prints_its_reason() -> None:
    own = RankBetween(Rank.NATIVE_LAYOUT, Rank.LINEAR_MEMORY, "plain JAX for short sequences")
    body = {
        "get_impl_name": classmethod(lambda cls: "zeta"),
        "rank": classmethod(lambda cls, request: own),
        "forward_cpu": lambda self, query, key, value: OperationOutput(query),
    }
    OperationRegistry.register(type("Zeta", (VanillaAttention,), body | {"__module__": "acme.zeta"}))
    lines = str(explain(asked())).splitlines()
    assert lines[1] == f"runs {CPU} (forward_native)"
    place = lines.index("  rank between 6 and 7 of 11: plain JAX for short sequences")
    assert lines[place - 1] == "acme:zeta: could serve it"
    assert place < lines.index(f"  {Rank.PRODUCT}")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((Rank.KERNEL, Rank.VENDOR_KERNEL, "why"), "must be consecutive ranks"),
        ((Rank.VENDOR_KERNEL, Rank.NATIVE, "why"), "must be consecutive ranks"),
        ((5, Rank.KERNEL, "why"), "better=5 and worse="),
        ((Rank.VENDOR_KERNEL, Rank.KERNEL, " "), "must say why, in a sentence"),
    ],
)
def test_what_is_no_rank_between_two_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RankBetween(*given)


@pytest.mark.parametrize("base", [VanillaAttention, ScaledDotProductAttention, FlashAttention])
def test_a_subclass_with_a_forward_for_the_platform_ranks_as_a_kernel_there_alone(base: Any) -> None:
    cls = type("Kernel", (base,), {"forward_tpu": lambda self, query, key, value: OperationOutput(query)})
    request = asked()
    assert cls.rank(request.replace(platform="tpu")) is Rank.KERNEL
    for platform in ("cpu", "cuda", "rocm", "tt"):
        elsewhere = request.replace(platform=platform)
        assert cls.rank(elsewhere) is base.rank(elsewhere)


@pytest.mark.usefixtures("_registered")
@pytest.mark.slow
def test_a_pick_of_auto_follows_the_environment_key() -> None:
    target = ["sm_70"]

    class Kernel(VanillaAttention):
        get_impl_name = classmethod(lambda cls: "zeta")
        rank = classmethod(lambda cls, request: Rank.EXCHANGES_KEYS)

        def forward_tt(self, query: Any, key: Any, value: Any) -> OperationOutput:
            return OperationOutput(jnp.full_like(query, 7))

        def environment_key(self) -> Hashable:
            return target[0]

        def unsupported(self, request: Any) -> Iterator[Reason]:
            if target[0] != "sm_90":
                yield Reason("GPU", target[0], "must be sm_90")

    OperationRegistry.register(Kernel)
    auto = OperationRegistry.create("auto", OperationMetadata(platform="tt"))
    x = jnp.ones((1, 4, 2, 8))
    for arch, value in (("sm_70", 1.0), ("sm_90", 7.0), ("sm_70", 1.0)):
        target[0] = arch
        assert jnp.allclose(auto(x, x, x).attention_outputs, value)
