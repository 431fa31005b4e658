"""Whisper tiny.en, with its real weights, transcribes speech with attnops' attention."""

from __future__ import annotations

import torch
import transformers as hf
from speech import RATE, speak
from transformers_faults import faulty
from whisper_checkpoint import END, LAYERS, NO_TIMESTAMPS, START, model, tokenizer

from attnops_adapters.transformers import attend_with, register

TEXT = "My name is John. I live in a small house near the river."
TOLERANCE = 2e-4  # of logits up to 30, and 1,500 keys


def test_speech_is_transcribed_and_logits_are_those_of_eager_attention(calls: list[set[str]]) -> None:
    """The decoder is given the text that it is to write: one pass has what greedy decoding picks for each token."""
    whisper = model()
    features = hf.WhisperFeatureExtractor(feature_size=80)(speak(TEXT), sampling_rate=RATE, return_tensors="pt")
    text = tokenizer().encode(" " + TEXT, add_special_tokens=False).ids
    inputs = {
        "input_features": features.input_features,
        "decoder_input_ids": torch.tensor([[START, NO_TIMESTAMPS, *text]]),
    }
    flash, logits = attend_with("flash"), {}
    register("attnops", flash)
    register("faulty", faulty(flash, "scale"))
    for implementation in ("eager", "attnops", "faulty"):
        whisper.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = whisper(**inputs, use_cache=False).logits[0]
    assert calls[: len(calls) // 2] == [{"Full"}] * LAYERS + [{"Causal"}, {"Full"}] * LAYERS
    assert logits["attnops"].argmax(-1)[1:].tolist() == [*text, END]
    assert (logits["attnops"] - logits["eager"]).abs().max() <= TOLERANCE
    assert (logits["faulty"] - logits["eager"]).abs().max() > 10 * TOLERANCE
