"""Models with linear layers: calls over caches and states, generation, documents, meshes, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from lm_model import call, close

from attnops.sharding import create_mesh
from attnops_caches import Rows
from attnops_lm import CausalLM
from attnops_lm.families import config_from_hf, config_to_hf
from attnops_lm.serve import Engine, Request
from attnops_lm.testing import SIZES, Characters, small

IDS = np.random.default_rng(0).integers(3, 90, (2, 12)).astype(np.int32)


@pytest.fixture(scope="module", params=["qwen3_next", "bamba"])
def model(request: pytest.FixtureRequest) -> CausalLM:
    return small(request.param)


@pytest.mark.slow
def test_calls_over_caches_are_one_call(model: CausalLM) -> None:
    starts = jnp.array([0, 3])
    expected = call(model, IDS, attention_mask=jnp.arange(12) >= starts[:, None]).logits
    caches = model.init_cache(2, 16, starts=starts)
    found = []
    for part, real in ((slice(0, 5), 5), (slice(5, 11), 6), (slice(11, 12), 1)):
        # Tokens after the real ones change nothing.
        given = np.pad(IDS[:, part], ((0, 0), (0, 2)), constant_values=7)
        out = call(model, given, past_key_values=caches, query_lengths=jnp.full(2, real))
        caches, found = out.past_key_values, [*found, out.logits[:, :real]]
    logits = jnp.concatenate(found, axis=1)
    close(logits[0], expected[0])
    close(logits[1, 3:], expected[1, 3:])
    np.testing.assert_array_equal([cache.lengths for cache in caches], [[12, 12]] * 2)


@pytest.mark.slow
def test_packed_rows_are_their_rows(model: CausalLM) -> None:
    expected = call(model, IDS).logits
    caches = model.init_cache(2, 16)
    first = np.concatenate([IDS[1, :9], IDS[0, :1]])[None]
    out = call(model, first, past_key_values=caches, rows=Rows(np.array([0, 9, 10]), np.array([1, 0])))
    close(out.logits[0, :9], expected[1, :9])
    close(out.logits[0, 9:], expected[0, :1])
    second = np.concatenate([IDS[1, 9:10], IDS[0, 1:]])[None]
    rows = Rows(np.array([0, 1, 12]), np.array([1, 0]))
    out = call(model, second, past_key_values=out.past_key_values, rows=rows)
    close(out.logits[0, 1:], expected[0, 1:])
    close(out.logits[0, :1], expected[1, 9:10])


@pytest.mark.slow
def test_documents_of_a_row_are_rows(model: CausalLM) -> None:
    packed = call(model, IDS.reshape(1, -1), segment_ids=jnp.repeat(jnp.arange(2), 12)[None]).logits
    close(packed.reshape(2, 12, -1), call(model, IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "paged"}, {"chunk": 3}], ids=str)
def test_generation_is_greedy_over_mixed_caches(model: CausalLM, options: dict[str, Any]) -> None:
    prompts = [IDS[0].tolist(), IDS[1, :5].tolist()]
    found = model.generate(prompts, max_new_tokens=6, **options).tokens
    for row, prompt in zip(found, prompts, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            padded = jnp.asarray([tokens + [0] * (20 - len(tokens))])
            tokens.append(int(call(model, padded).logits[0, len(tokens) - 1].argmax()))
        assert row.tolist() == tokens[len(prompt) :]


@pytest.mark.slow
def test_a_sharded_model_and_one_with_lora(model: CausalLM) -> None:
    expected = call(model, IDS).logits
    sharded = model.shard_model(mesh=create_mesh((2, 2, 2), ("dp", "ep", "tp")))
    if model.config.experts is not None:
        assert sharded.layers[0].mlp.gate_up[...].sharding.shard_shape((4, 32, 48)) == (2, 32, 24)
    close(call(sharded, IDS).logits, expected)
    caches = sharded.init_cache(2, 16)
    state: Any = caches[0].state
    assert state.sharding.shard_shape(state.shape)[:2] == (1, 2)
    close(call(sharded, IDS, past_key_values=caches).logits, expected)
    tuned = model.apply_lora_to_layers(4, r"attention\.(qkvz|inputs|o)$")
    close(call(tuned, IDS).logits, expected)
    assert "lora_a" in str(tuned.layers[0].attention)


@pytest.mark.slow
def test_requests_of_a_server_that_join_leave_and_are_preempted(model: CausalLM) -> None:
    prompts = [IDS[0].tolist(), IDS[1, :5].tolist(), IDS[0, :7].tolist(), IDS[1].tolist()]
    expected = [row.tolist() for row in model.generate(prompts, max_new_tokens=9).tokens]
    # Two rows and too few pages for both: a row gets another request, and one is computed again.
    engine = Engine(model, Characters(), rows=2, pages=8, page_size=4, max_length=24, chunks=[8])
    requests = [Request(list(prompt), 9) for prompt in prompts]
    engine.submit(*requests)
    while engine.step():
        pass
    assert [request.tokens[request.prompt_length :] for request in requests] == expected
    assert engine.counts["preempted"] >= 1
    assert engine.counts["shared"] == 0


def test_what_states_cannot_do_is_refused() -> None:
    model = CausalLM.lazy_init(config_from_hf({"model_type": "qwen3_next", "full_attention_interval": 2} | SIZES))
    for options, text in (
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3, but the states of linear layers can't"),
        ({"num_beams": 2, "cache_implementation": "paged"}, "num_beams=2 and cache_implementation='paged', but beams"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            model.generate(IDS, max_new_tokens=3, **options)  # type: ignore[arg-type]
    hf = config_to_hf(model.config)
    for changes, text in (
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2, but every layer must have experts"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has linear_attention alone"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            config_from_hf(hf | changes)
