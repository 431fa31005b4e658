"""What vLLM finds when it starts, and what it is refused."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from tpu_inference.layers.common import attention_backend
from tpu_inference.platforms.tpu_platform import TpuPlatform
from vllm.config.attention import AttentionConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attnops import UnsupportedError
from attnops_vllm import refusals
from attnops_vllm.backend import EngineAttention
from attnops_vllm.layers import AttnopsBackend, AttnopsBackendImpl


@pytest.fixture(autouse=True)
def registered() -> None:
    (point,) = entry_points(group="vllm.general_plugins", name="attnops")
    for _ in range(2):  # vLLM may run it again
        point.load()()


def test_the_name_selects_the_backend_and_the_layers() -> None:
    member = AttentionConfig(backend="attnops").backend
    assert member is AttentionBackendEnum["ATTNOPS"]
    assert isinstance(attention_backend.create_attention_backend("attnops"), EngineAttention)
    path = TpuPlatform.get_attn_backend_cls(member, SimpleNamespace(use_mla=False))
    assert resolve_obj_by_qualname(path) is AttnopsBackend
    assert AttnopsBackend.get_impl_cls() is AttnopsBackendImpl


def layer(**options: Any) -> AttnopsBackendImpl:
    given = {"num_heads": 2, "head_size": 64, "scale": 0.1, "num_kv_heads": 1, "sliding_window": None}
    return AttnopsBackendImpl(**given, **{"alibi_slopes": None, "kv_cache_dtype": "auto"} | options)


def test_a_layer_gives_its_soft_cap_to_its_backend() -> None:
    assert layer().attention_backend == "attnops"
    capped = [layer(logits_soft_cap=cap).attention_backend for cap in (30.0, 50.0, 30.0)]
    assert [attention_backend.create_attention_backend(name).soft_cap for name in capped] == [30.0, 50.0, 30.0]
    assert len({"attnops", *capped}) == 3


def test_alibi_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Alibi"):
        layer(alibi_slopes=[0.5, 0.25])


def config(**changes: Any) -> Any:
    parts = {"model": {"use_mla": False, "model": "m"}, "transfer": None}
    parts["parallel"] = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    for name, value in changes.items():
        parts[name] = (parts[name] or {}) | value
    model, parallel, transfer = (x and SimpleNamespace(**x) for x in map(parts.get, ("model", "parallel", "transfer")))
    return SimpleNamespace(model_config=model, parallel_config=parallel, kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "vllm", []),
        ({"model": {"use_mla": True}}, "vllm", ["model=m: has latent attention (MLA)"]),
        ({}, "flax_nnx", ["MODEL_IMPL_TYPE=flax_nnx: ", "set MODEL_IMPL_TYPE=vllm"]),
        ({"parallel": {"decode_context_parallel_size": 2}}, "vllm", ["decode_context_parallel_size=2: shards"]),
        ({"parallel": {"prefill_context_parallel_size": 4}}, "vllm", ["give --prefill-context-parallel-size 1"]),
        ({"transfer": {"kv_connector": "TPUConnector"}}, "vllm", ["kv_transfer_config=TPUConnector: moves pages"]),
    ],
)
def test_an_engine_is_refused_with_the_reason(
    changes: Any, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_kind_of_model", lambda config: kind)
    text = "\n".join(map(str, refusals.engine_reasons(config(**changes))))
    assert all(x in text for x in words)
    assert bool(text) == bool(words)


def test_the_current_engine_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_kind_of_model", lambda config: "flax_nnx")
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", config)
    with pytest.raises(UnsupportedError, match="--attention-backend attnops:\n  - MODEL_IMPL_TYPE=flax_nnx"):
        attention_backend.create_attention_backend("attnops")


@pytest.mark.parametrize(
    ("name", "value"), [("TPU_MULTIHOST_BACKEND", "ray"), ("VLLM_WORKER_MULTIPROC_METHOD", "spawn")]
)
def test_other_processes_are_refused_by_the_engine(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    given = SimpleNamespace(attention_config=AttentionConfig(backend="attnops"))
    with pytest.raises(ValueError, match=f"attnops supports a single host .* not: {name}={value}"):
        attention_backend.check_attention_backend_config(given)
