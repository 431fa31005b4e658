"""A layer of SGLang's engine with attnops, against a plain computation in float64; and what is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_pages import CASES, PAGE, PAGES, ROWS, B, Batch, batch, check, plain, problem
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from sgl_jax.srt.layers.radix_attention import AttentionType, RadixAttention
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

import attnops_sglang
from attnops import OperationMetadata, UnsupportedError
from attnops_caches.engines import Scores
from attnops_sglang.backend import EngineAttention
from attnops_sglang.pool import EnginePages

TPU = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")


def mesh_of(data: int, tensor: int) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), (AxisType.Explicit,) * 2)


def engine_batch(parts: list[Batch]) -> Any:
    """What the scheduler gives the backend of extended rows, each of ``parts`` a shard's."""
    count, slots, lengths, new = len(ROWS), [], [], []
    for part in parts:
        table, length = np.asarray(part.table).reshape(B, -1), np.where(np.arange(B) < count, part.lengths, 0)
        pages = [table[row, : -(-length[row] // PAGE)] for row in range(B)]
        flat = (np.concatenate(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        slots.append(np.pad(flat, (0, B * table.shape[1] * PAGE - len(flat))))
        lengths.append(length)
        new.append(np.diff(part.starts) * (np.arange(B) < count))
    return SimpleNamespace(
        dp_size=len(parts), per_dp_bs_size=B, seq_lens=np.concatenate(lengths), cache_loc=np.concatenate(slots),
        forward_mode=ForwardMode.EXTEND, extend_seq_lens=np.concatenate(new),
    )  # fmt: skip


def through_the_engine(parts: list[Batch], mesh: Mesh, scores: Scores, sinks: Any = None, **options: Any) -> Any:
    """The output and the pages of a layer, from the engine's own classes."""
    H, K, D = parts[0].query.shape[1], parts[0].key.shape[1], parts[0].query.shape[2]
    layer = RadixAttention(
        H, D, scores.scale, K, 0, sliding_window_size=scores.window or 0, logit_cap=scores.soft_cap or 0,
        attn_type=AttentionType.DECODER if scores.causal else AttentionType.ENCODER_ONLY,
    )  # fmt: skip
    for name, value in options.items():
        setattr(layer, name, value)
    n = len(parts)
    backend = EngineAttention(H, K, D, page_size=PAGE, mesh=mesh, max_pages=5)
    pool = EnginePages((PAGES - 1) * PAGE * n, PAGE, parts[0].pages.dtype, K, D, 1, mesh, dp_size=n)
    joined = Batch(*(jnp.concatenate(x) for x in zip(*(part.args for part in parts), strict=True)))
    assert pool.kv_buffer[0].shape == joined.pages.shape
    pool.replace_buffer([jax.device_put(jnp.array(joined.pages), pool.kv_sharding)])  # a copy, which is donated
    backend.forward_metadata = backend.get_forward_metadata(engine_batch(parts))
    of_tokens = NamedSharding(mesh, PartitionSpec("data", "tensor", None))
    arrays = [jax.device_put(x, of_tokens) for x in (joined.query, joined.key, joined.value)]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) if sinks.dtype == jnp.float64 else sinks
        sinks = jax.device_put(sinks, NamedSharding(mesh, PartitionSpec("tensor")))
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda pool, backend, q, k, v: backend(q, k, v, layer, None, pool, attention_sink=sinks), donate_argnums=0
        )
        out, pages = run(pool, backend, *arrays)
    return np.asarray(out.astype(jnp.float32)).reshape(joined.query.shape), pages


SERVED = ["plain", "window, D 80", "both directions, window", "cap, sinks, D 128", "bfloat16, one kv head"]


@pytest.mark.parametrize(("case", "is_interpreted"), [*((x, False) for x in SERVED), ("window, D 80", True)])
def test_values_and_pages(case: str, is_interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case in CASES
    monkeypatch.setattr(EngineAttention, "operation", TPU if is_interpreted else None)
    with jax.enable_x64(True):
        given, scores, sinks = problem(case)
    out, pages = through_the_engine([given], mesh_of(1, 1), scores, sinks)
    with jax.enable_x64(True):
        check(given, scores, sinks, out, pages)


def test_a_mesh_shards_heads_and_rows() -> None:
    scores, sinks = Scores(scale=0.3, window=30), jnp.linspace(-1, 2, 4)
    parts = [batch(seed=seed) for seed in (0, 1)]
    with jax.enable_x64(True):
        wanted = [plain(part, scores, sinks) for part in parts]
    out, pages = through_the_engine(parts, mesh_of(2, 2), scores, sinks)
    np.testing.assert_allclose(out, np.concatenate([x for x, _ in wanted]), atol=2e-5)
    np.testing.assert_array_equal(pages, np.concatenate([x for _, x in wanted]).astype(np.float32))


def test_float8_pages_hold_rounded_tokens() -> None:
    """The engine gives keys in the model's dtype: large ones are clipped, and none becomes NaN."""
    with jax.enable_x64(True):
        given, scores, sinks = problem("float8")
    given = dataclasses.replace(given, key=given.key.astype(jnp.float32), value=given.value.astype(jnp.float32))
    given = dataclasses.replace(given, key=given.key.at[0, 0, 0].set(1e4))
    one = dataclasses.replace(scores, k_scale=1.0, v_scale=1.0)
    out, pages = through_the_engine([given], mesh_of(1, 1), one, sinks)
    rounded = jnp.clip(given.key, -448, 448).astype(given.pages.dtype), given.value.astype(given.pages.dtype)
    with jax.enable_x64(True):
        check(dataclasses.replace(given, key=rounded[0], value=rounded[1]), one, sinks, out, pages)


@pytest.mark.parametrize(
    ("name", "value", "width", "words"),
    [
        ("xai_temperature_len", 1024, 64, r"xai_temperature_len=1024: scales queries by position"),
        ("v_head_dim", 32, 32, r"v_head_dim=32: must be head_dim=64, or the model pads"),
    ],
)
def test_layers_that_are_not_served_are_refused(name: str, value: Any, width: int, words: str) -> None:
    given = batch()
    given = dataclasses.replace(given, value=given.value[..., :width])
    with pytest.raises(UnsupportedError, match=words):
        through_the_engine([given], mesh_of(1, 1), Scores(scale=0.3), **{name: value})


def test_a_layer_of_mimo_v2() -> None:
    """Its values are padded to the width of keys, its sinks have the model's dtype; a window of -1 is none."""
    with jax.enable_x64(True):
        given, scores, sinks = problem("bfloat16, one kv head")
    given = dataclasses.replace(given, value=given.value.at[..., 32:].set(0))
    scores, sinks = dataclasses.replace(scores, window=None), jnp.linspace(-1, 2, 4, dtype=jnp.bfloat16)
    options = {"v_head_dim": 32, "sliding_window_size": -1}
    out, pages = through_the_engine([given], mesh_of(1, 1), scores, sinks, **options)
    with jax.enable_x64(True):
        check(given, scores, sinks, out, pages)


def test_pages_in_bfloat16_of_a_model_in_float32() -> None:
    """--kv-cache-dtype bf16: keys and values are rounded, and queries are not."""
    with jax.enable_x64(True):
        given, scores, sinks = problem("bfloat16, one kv head")
    given = dataclasses.replace(given, query=batch(K=1).query)
    out, pages = through_the_engine([given], mesh_of(1, 1), scores, sinks)
    with jax.enable_x64(True):
        check(given, scores, sinks, out, pages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_mla_backend": True}, r"has latent attention \(MLA\)"),
        ({"speculative_algorithm": "EAGLE"}, r"speculative_algorithm=EAGLE"),
        ({"disaggregation_mode": "prefill"}, r"disaggregation_mode=prefill: moves pages"),
        ({"pd_disaggregation": "pathways"}, r"pd_disaggregation=pathways: moves pages"),
        ({"hicache_storage": "none"}, r"hicache_storage=none: moves pages"),
        ({"dtype": jnp.float64}, r"kv_cache_dtype=float64: must be one of"),
    ],
)
def test_engines_that_are_not_served_are_refused_at_start(change: dict[str, Any], words: str) -> None:
    args = {
        "model_path": "m",
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "pd_disaggregation": "",
        "hicache_storage": "disable",
        "kv_cache_dtype": "auto",
        "use_mla_backend": False,
        "dtype": jnp.bfloat16,
    }
    args |= change
    runner = SimpleNamespace(
        use_mla_backend=args.pop("use_mla_backend"), page_size=PAGE, server_args=SimpleNamespace(**args),
        model_config=SimpleNamespace(dtype=args.pop("dtype"), head_dim=64),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=words):
        attnops_sglang.create_backend(runner)


def test_other_code_that_reads_the_pool_is_refused() -> None:
    pool = EnginePages(PAGE * 4, PAGE, jnp.float32, 2, 64, 1, mesh_of(1, 1))
    with pytest.raises(NotImplementedError, match="written and read by its backend alone"):
        pool.get_cpu_copy([0])
