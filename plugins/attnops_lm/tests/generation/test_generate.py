"""Generated tokens equal those of the model without a cache, whatever cache, chunks and drafts are used."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_budget import compiled

from attnops_caches import WindowCache
from attnops_lm.generation.config import GenerationConfig
from attnops_lm.generation.loop import Generated
from attnops_lm.generation.programs import Settings, prompt_program, split, step_program
from attnops_lm.generation.prompt import chunk_size
from attnops_lm.generation.text import TextStreamer
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.testing import small

P, N = 11, 7
PROMPT = np.random.default_rng(0).integers(3, 90, (3, P))
LENGTHS = (11, 6, 9)


class Letters:
    """Token i is written with three letters, so that stop strings lie across tokens."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{i:02d}," for i in ids)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return small(num_hidden_layers=1)


@pytest.fixture(scope="module")
def windowed() -> CausalLM:
    return small("mistral", num_hidden_layers=1)


@functools.lru_cache
def uncached(model: CausalLM, ragged: bool = False) -> np.ndarray:
    """Greedy tokens, each from a pass over all tokens."""

    @jax.jit
    def scores(tokens: jax.Array, at: jax.Array) -> jax.Array:
        return model(tokens, logits_at=at[:, None]).logits[:, 0]

    lengths = np.array(LENGTHS if ragged else (P,) * 3)
    tokens = np.zeros((3, P + N), np.int64)
    tokens[:, :P] = PROMPT
    row = np.arange(3)
    for i in range(N):  # padding after a row's end is never seen
        tokens[row, lengths + i] = np.asarray(scores(jnp.asarray(tokens), jnp.asarray(lengths + i - 1))).argmax(-1)
    return np.stack([own[n : n + N] for own, n in zip(tokens, lengths, strict=True)])


def greedy(model: CausalLM, prompt: Any = PROMPT, **options: Any) -> Generated:
    return model.generate(prompt, GenerationConfig(max_new_tokens=N, eos_token_id=()), **options)


def mask_of(left: bool) -> np.ndarray:
    place = np.arange(P)[::-1] if left else np.arange(P)
    return (place < np.array(LENGTHS)[:, None]).astype(int)


def left_padded() -> np.ndarray:
    return np.stack([np.roll(row, P - n) for row, n in zip(PROMPT, LENGTHS, strict=True)])


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.slow
def test_greedy_tokens_are_the_argmax_without_a_cache(model: CausalLM, chunk: int | None) -> None:
    found = greedy(model, chunk=chunk)
    np.testing.assert_array_equal(found.tokens, uncached(model))
    np.testing.assert_array_equal(found.sequences, np.concatenate([PROMPT, uncached(model)], axis=1))
    assert (found.lengths.tolist(), found.steps) == ([N] * 3, N)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, 3])
def test_padded_prompts_are_continued_as_each_alone(model: CausalLM, drafts: int | None) -> None:
    wanted = uncached(model, ragged=True)
    right = greedy(model, attention_mask=mask_of(left=False), chunk=4, prompt_lookup_num_tokens=drafts)
    np.testing.assert_array_equal(right.tokens, wanted)
    lists = [row[:n].tolist() for row, n in zip(PROMPT, LENGTHS, strict=True)]
    np.testing.assert_array_equal(greedy(model, lists, chunk=4, prompt_lookup_num_tokens=drafts).tokens, wanted)
    left = greedy(model, left_padded(), attention_mask=mask_of(left=True), chunk=4, prompt_lookup_num_tokens=drafts)
    np.testing.assert_array_equal(left.tokens, wanted)
    # Negative control: without the mask padding is seen.
    assert (greedy(model, left_padded(), chunk=4, prompt_lookup_num_tokens=drafts).tokens != wanted).any()


@pytest.mark.parametrize("storage", ["paged", "sliding_window"])
@pytest.mark.slow
def test_storages_give_the_same_tokens(windowed: CausalLM, storage: str) -> None:
    found = greedy(windowed, attention_mask=mask_of(left=False), chunk=4, cache_implementation=storage)
    np.testing.assert_array_equal(found.tokens, uncached(windowed, ragged=True))
    left = greedy(windowed, left_padded(), attention_mask=mask_of(left=True), chunk=4, cache_implementation=storage)
    np.testing.assert_array_equal(left.tokens, found.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["static", "paged", "sliding_window"])
@pytest.mark.tier(every=3)
def test_drafts_give_the_tokens_of_plain_decoding_in_fewer_steps(windowed: CausalLM, storage: str) -> None:
    # A prompt that repeats itself, and a processor that raises the score of a token's successor in the prompt.
    prompt = np.tile(PROMPT[:, :5], 2)

    def repeat(tokens: jax.Array, scores: jax.Array, lengths: jax.Array) -> jax.Array:
        wanted = jnp.take_along_axis(tokens, lengths[:, None] % 5, axis=1)
        often = (lengths % 4 > 0)[:, None]
        return scores + 100 * often * (jnp.arange(scores.shape[1]) == wanted)

    config = GenerationConfig(max_new_tokens=12, eos_token_id=())
    plain = windowed.generate(prompt, config, logits_processor=repeat)
    found = windowed.generate(
        prompt, config, logits_processor=repeat, prompt_lookup_num_tokens=3, cache_implementation=storage
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.steps < plain.steps
    assert (found.accepted > 0).all()
    assert (found.drafted > found.accepted).any()  # some were taken back
    assert (found.accepted + found.steps >= 12).all()
    assert found.past_key_values is not None
    assert isinstance(found.past_key_values[0], WindowCache) == (storage == "sliding_window")
    np.testing.assert_array_equal(found.past_key_values[0].lengths, np.full(3, 10 + 12 - 1))


@pytest.mark.slow
def test_sampled_rows_do_not_depend_on_batch_chunks_or_drafts(model: CausalLM) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.95}
    keys = jax.random.split(jax.random.key(3), 3)
    together = greedy(model, prng_key=keys, **options)
    assert (together.tokens != uncached(model)).any()
    drafted = greedy(model, prng_key=keys, chunk=4, prompt_lookup_num_tokens=3, **options)
    np.testing.assert_array_equal(drafted.tokens, together.tokens)
    alone = greedy(model, PROMPT[1:2], prng_key=keys[1:2], **options)
    np.testing.assert_array_equal(alone.tokens, together.tokens[1:2])
    several = greedy(model, PROMPT[:1], prng_key=jax.random.key(1), num_return_sequences=3, **options)
    assert len({tuple(row) for row in several.tokens.tolist()}) == 3


def test_rows_end_at_their_end_token_and_are_padded(model: CausalLM) -> None:
    wanted = uncached(model)
    end = int(wanted[0, 2])
    assert (wanted[1:] != end).all()
    found = greedy(model, eos_token_id=end, pad_token_id=95)
    assert found.lengths.tolist() == [3, N, N]
    np.testing.assert_array_equal(found.tokens[0], [*wanted[0, :3], *[95] * (N - 3)])
    np.testing.assert_array_equal(found.tokens[1:], wanted[1:])
    later = greedy(model, eos_token_id=end, min_new_tokens=4)
    assert end not in later.tokens[0, :4]
    np.testing.assert_array_equal(later.tokens[0, :2], wanted[0, :2])


def test_the_penalty_is_that_of_seen_tokens(model: CausalLM) -> None:
    found = greedy(model, repetition_penalty=1e6, attention_mask=mask_of(left=False))
    for row, prompt, n in zip(found.tokens.tolist(), PROMPT.tolist(), LENGTHS, strict=True):
        assert len(set(row)) == N
        assert not set(row) & set(prompt[:n])


@pytest.mark.slow
def test_a_cache_is_continued(model: CausalLM) -> None:
    caches = model.init_cache(3, 32)
    first = greedy(model, PROMPT[:, :4], max_new_tokens=1, past_key_values=caches)
    assert first.past_key_values is not None
    second = greedy(model, PROMPT[:, 4:], past_key_values=tuple(first.past_key_values), chunk=4)
    np.testing.assert_array_equal(second.tokens, uncached(model))


@pytest.mark.parametrize("drafts", [None, 3])
@pytest.mark.tier(quick=["None"])
def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(model: CausalLM, drafts: int | None) -> None:
    wanted = uncached(model)
    stop = f"{wanted[0, 1]:02d},{wanted[0, 2]:02d}"[1:]  # from within one token to within the next
    shown: list[str] = []
    found = greedy(model, tokenizer=Letters(), stop_strings=stop, prompt_lookup_num_tokens=drafts)
    assert found.texts is not None
    whole = Letters().decode(wanted[0].tolist())
    assert found.texts[0] == whole[: whole.find(stop)]
    assert found.lengths.tolist() == [3, N, N]
    np.testing.assert_array_equal(found.tokens[1:], wanted[1:])
    assert found.texts[1] == Letters().decode(wanted[1].tolist())
    assert found.past_key_values is not None
    np.testing.assert_array_equal(found.past_key_values[0].lengths, P - 1 + found.lengths)

    streamer = TextStreamer(Letters(), shown.append, stops=(stop,))
    greedy(
        model, PROMPT[:1], tokenizer=Letters(), stop_strings=stop, streamer=streamer, prompt_lookup_num_tokens=drafts
    )
    assert "".join(shown) == found.texts[0]


@pytest.mark.parametrize("drafts", [None, 3])
def test_a_streamer_is_given_every_token_once(model: CausalLM, drafts: int | None) -> None:
    class Columns:
        def __init__(self) -> None:
            self.values: list[np.ndarray] = []
            self.ended = False

        def put(self, value: np.ndarray) -> None:
            self.values.append(value)

        def end(self) -> None:
            self.ended = True

    streamer = Columns()
    found = greedy(model, streamer=streamer, eos_token_id=int(uncached(model)[0, 2]), prompt_lookup_num_tokens=drafts)
    np.testing.assert_array_equal(streamer.values[0], PROMPT)
    np.testing.assert_array_equal(np.stack(streamer.values[1:], axis=1), found.tokens)
    assert streamer.ended


@pytest.mark.slow
def test_without_trace_the_tokens_are_the_same(model: CausalLM) -> None:
    found = greedy(model, trace=False, max_new_tokens=2)
    np.testing.assert_array_equal(found.tokens, uncached(model)[:, :2])


@pytest.mark.slow
def test_two_programs_serve_all_ways_to_draw() -> None:
    model = small(num_hidden_layers=1, vocab_size=64)
    network, _ = split(model)
    key = jax.random.key(0)
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.5},
        {"top_k": 3, "top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 9},
    )
    for n, options in enumerate(ways):
        drawing: dict[str, Any] = {"do_sample": True, "prng_key": key} if options else {}
        ids = PROMPT[:, : 11 - n] % 64
        model.generate(ids, max_new_tokens=2 + n, eos_token_id=n, repetition_penalty=1 + n / 9, **drawing, **options)
        model.generate(ids, max_new_tokens=2, tokenizer=Letters(), stop_strings="x")
    assert step_program(network, Settings()).traces == 1
    assert prompt_program(network, True).traces == 1


@pytest.mark.slow
def test_a_first_call_compiles_four_programs_and_a_first_beam_search_two_more() -> None:
    model = small(num_hidden_layers=1, vocab_size=56)
    jax.clear_caches()
    for beams, most in ((1, 4), (3, 2)):
        before = compiled()
        model.generate([[1, 2, 3]], max_new_tokens=4, num_beams=beams)
        assert 1 <= compiled() - before <= most


def test_models_share_programs_unless_they_differ_in_more_than_weights_and_origin(model: CausalLM) -> None:
    network, leaves = split(model)
    other = CausalLM.lazy_init(model.config)
    other.origin = Origin(Path("somewhere"))
    assert split(other)[0] is split(CausalLM.lazy_init(model.config))[0]
    norm = model.norm.scale.get_value()
    model.norm.scale.set_value(jax.device_put(np.asarray(norm) * 2))
    changed = split(model)
    model.norm.scale.set_value(norm)
    assert changed[0] is network
    assert sum(a is not b for a, b in zip(leaves, changed[1], strict=True)) == 1
    model.norm.eps, eps = 0.5, model.norm.eps
    assert split(model)[0] is not network
    model.norm.eps = eps


@pytest.mark.slow
def test_the_documented_loop_gives_the_same_tokens(model: CausalLM) -> None:
    assert model.can_generate()
    inputs = model.prepare_inputs_for_generation(PROMPT, 32, 0, attention_mask=mask_of(left=False))
    call = jax.jit(lambda tokens, inputs: model(tokens, **inputs))
    out, tokens = call(jnp.asarray(PROMPT), inputs), []
    for _ in range(3):
        tokens.append(out.logits[:, -1].argmax(-1))
        inputs = model.update_inputs_for_generation(out, inputs)
        out = call(tokens[-1][:, None], inputs)
    np.testing.assert_array_equal(np.stack(tokens, axis=1), uncached(model, ragged=True)[:, :3])


@pytest.mark.slow
def test_chunks_of_a_prompt_are_padded_little_and_have_few_sizes() -> None:
    sizes = {n: chunk_size(None, n, None) for n in range(1, 3000)}
    assert len(set(sizes.values())) == 16
    for n, size in sizes.items():
        chunks = -(-n // size)
        assert chunks == -(-n // 512)
        assert chunks * size - n < max(16, n // 4) + chunks
    assert chunk_size(None, 600, 100) == 100
