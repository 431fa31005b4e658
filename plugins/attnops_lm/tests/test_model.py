"""The model with caches against the model without, on small random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_model import call, close, tokens

from attnops_caches import Rows
from attnops_lm.caching import with_table
from attnops_lm.model import CausalLM, SequenceClassifier
from attnops_lm.testing import small

B, T, S = 3, 21, 32
# By family and whether layers with windows have rings.
CASES = [("llama", False), ("gpt_oss", True)]
OTHERS = [
    ("llama", True),
    ("mistral", False),
    ("mistral", True),
    ("gemma2", False),
    ("gemma2", True),
    ("gpt_oss", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ring"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
@pytest.mark.tier(every=4)
def test_a_prompt_in_chunks_over_caches_is_the_prompt_without(family: str, ring: bool) -> None:
    model, ids = small(family), tokens()
    expected = call(model, ids).logits
    caches = model.init_cache(B, S, max_append=8 if ring else None)
    found = []
    for start in range(0, T, 7):
        out = call(model, ids[:, start : start + 7], past_key_values=caches)
        caches = out.past_key_values
        found.append(out.logits)
    close(jnp.concatenate(found, axis=1), expected)
    assert not caches[0].overflowed.any()


@pytest.mark.slow
def test_left_padding_and_ragged_rows_are_each_row_alone() -> None:
    model, ids = small("gemma2"), np.asarray(tokens())
    lengths, starts = np.array([21, 13, 17]), np.array([0, 4, 2])
    padded, mask = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for b in range(B):
        padded[b, starts[b] : lengths[b]] = ids[b, : lengths[b] - starts[b]]
        mask[b, starts[b] : lengths[b]] = True
    expected = call(model, ids).logits  # causal: what follows a token does not matter to it
    caches = model.init_cache(B, S, starts=starts)
    out = call(model, padded, past_key_values=caches, query_lengths=jnp.asarray(lengths))
    masked = call(model, padded, attention_mask=mask)
    for b in range(B):
        for logits in (out.logits, masked.logits):
            close(logits[b, starts[b] : lengths[b]], expected[b, : lengths[b] - starts[b]])


@pytest.mark.slow
def test_packed_rows_over_pages_are_each_row_alone() -> None:
    model, ids = small("gpt_oss"), tokens()
    expected = call(model, ids).logits
    caches, pool = model.init_ragged_pages(page_size=4, max_model_length=S, pages=B * S // 4, batch_size=B)
    first = np.array([9, 0, 14])  # tokens of each row in the first call
    for counts, begin in ((first, np.zeros(B, int)), (T - first, first)):
        pool = pool.reserve(caches[0].lengths + counts)
        runs = [np.asarray(ids)[b, begin[b] : begin[b] + counts[b]] for b in range(B)]
        packed = np.concatenate([*runs, np.zeros(40 - counts.sum(), np.int32)])[None]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = Rows(jnp.asarray(starts), jnp.arange(B))
        out = call(model, packed, past_key_values=with_table(caches, pool.table), rows=rows)
        caches = out.past_key_values
        for b in range(B):
            close(out.logits[0, starts[b] : starts[b + 1]], expected[b, begin[b] : begin[b] + counts[b]])


@pytest.mark.slow
def test_logits_at_some_tokens_and_packed_documents() -> None:
    model, ids = small(), tokens()
    full = call(model, ids).logits
    at = jnp.array([[3, 20], [0, 1], [5, 5]])
    close(call(model, ids, logits_at=at).logits, jnp.take_along_axis(full, at[..., None], axis=1))
    close(call(model, None, inputs_embeds=model.embed[...][ids]).logits, full)
    packed = jnp.concatenate([ids[:1, :10], ids[1:2, :11]], axis=1)
    segments = jnp.asarray([[0] * 10 + [1] * 11])
    out = call(model, packed, segment_ids=segments).logits[0]
    close(out[:10], full[0, :10])
    close(out[10:], full[1, :11])


@pytest.mark.slow
def test_a_classifier_reads_the_last_token_that_is_not_padding() -> None:
    model = SequenceClassifier(small().config, 5)
    ids = tokens()
    mask = jnp.asarray(np.arange(T) < np.array([[21], [9], [1]]))
    out = call(model, ids, attention_mask=mask).logits
    assert out.shape == (B, 5)
    full = call(model, ids).last_hidden_state
    for b, length in enumerate((21, 9, 1)):
        close(out[b], model.score(full[b, length - 1]))


@pytest.mark.slow
def test_saved_and_loaded_it_is_the_same(tmp_path: object) -> None:
    model, ids = small("gemma2"), tokens()
    model.save_pretrained(tmp_path)  # type: ignore[arg-type]
    loaded = CausalLM.from_pretrained(tmp_path, operation="vanilla")  # type: ignore[arg-type]
    assert loaded.config == model.config
    close(call(loaded, ids).logits, call(model, ids).logits)
    half = CausalLM.from_pretrained(tmp_path, dtype=jnp.bfloat16)  # type: ignore[arg-type]
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}


def test_what_excludes_each_other_is_refused() -> None:
    model, ids = small(), tokens()
    caches = model.init_cache(B, S)
    with pytest.raises(ValueError, match="one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="without past_key_values"):
        model(ids, attention_mask=jnp.ones((B, T)), past_key_values=caches)
    with pytest.raises(ValueError, match="1 caches given, but the model has 2 layers"):
        model(ids, past_key_values=caches[:1])
    with pytest.raises(ValueError, match="with past_key_values"):
        model(ids, query_lengths=jnp.ones(B, jnp.int32))
    with pytest.raises(ValueError, match=r"starts=\[0, 9\] must be from 0 to max_length=8"):
        model.init_cache(2, 8, starts=[0, 9])
    with pytest.raises(ValueError, match=r"starts=-1 must be from 0 to max_length=8"):
        model.init_cache(2, 8, starts=-1)
    with pytest.raises(ValueError, match=r"starts are int64 \(3,\), but must be one integer or 2, one per row"):
        model.init_cache(2, 8, starts=[0, 1, 2])
    # Values that have no hash too, which a program's static arguments must have.
    with pytest.raises(ValueError, match=r"batch_size=\[2\] must be an int of at least 1"):
        model.init_cache([2], 8)
    with pytest.raises(ValueError, match=r"max_length=Array\(8.*\) must be an int of at least 1"):
        model.init_cache(2, jnp.int32(8))
    with pytest.raises(ValueError, match="max_append=-1 must be an int of at least 1"):  # without windows too
        model.init_cache(2, 8, max_append=-1)
    with pytest.raises(ValueError, match=r"codec=\{\} must be None or an attnops_caches.Quantized"):
        model.init_cache(2, 8, codec={})
    with pytest.raises(ValueError, match="does not report its memory"):
        model.init_ragged_pages(page_size=4, hbm_utilization=0.9, max_model_length=S)
    with pytest.raises(ValueError, match=r"num_heads=4 must be a multiple of num_kv_heads=3"):
        small(num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"model_type='bert' must be one of"):
        small(model_type="bert")


@pytest.mark.slow
def test_lists_are_taken_and_other_shapes_and_dtypes_refused() -> None:
    model = small()
    expected = model(jnp.array([[1, 2, 3]]), attention_mask=jnp.array([[1, 1, 0]]), logits_at=jnp.array([[1]]))
    assert jnp.array_equal(model([[1, 2, 3]], attention_mask=[[1, 1, 0]], logits_at=[[1]]).logits, expected.logits)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": jnp.ones((1, 2))}, r"input_ids are float32 \(1, 2\), but must be integers \[B, T\]"),
        ({"input_ids": jnp.ones(3, int)}, r"input_ids are int32 \(3,\), but must be integers"),
        ({"inputs_embeds": jnp.ones((3, 32))}, r"inputs_embeds have shape \(3, 32\), but must be \[B, T, M\]"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, r"attention_mask has shape \(1, 1\), but must .* \(1, 2\)"),
        ({"input_ids": [[1, 2]], "segment_ids": [0, 1]}, r"segment_ids has shape \(2,\), but must .* \(1, 2\)"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            model(**options)


@pytest.mark.slow
def test_logits_of_no_tokens_are_empty() -> None:
    none = jnp.zeros((B, 0), jnp.int32)
    for tied in (True, False):
        model = small(tie_word_embeddings=tied, num_hidden_layers=1)
        assert model(tokens(), logits_at=none).logits.shape == (B, 0, 96)


@pytest.mark.slow
def test_embeddings_are_taken_as_they_are_given_where_a_family_scales_its_own() -> None:
    model = small("gemma2", num_hidden_layers=1)
    embeds = model.embed[...][tokens()] * model.config.embedding_scale
    close(call(model, inputs_embeds=embeds).logits, call(model, tokens()).logits)


@pytest.mark.slow
def test_a_classifier_refuses_caches() -> None:
    model = SequenceClassifier(small(num_hidden_layers=1).config, 3)
    with pytest.raises(ValueError, match="past_key_values are given, but a classifier"):
        model(tokens(), past_key_values=())
