"""`generate`: the prompt in chunks, then steps until every row has ended."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from attnops_lm.caching import counted, truncated
from attnops_lm.generation.beam import EARLY, BeamPages, BeamRules, Beams, beam_programs
from attnops_lm.generation.config import GenerationConfig
from attnops_lm.generation.programs import Caches, Leaves, Settings, StepProgram, prompt_program, split, step_program
from attnops_lm.generation.prompt import Prompt, chunk_size, read_prompt
from attnops_lm.generation.room import Room, make_room
from attnops_lm.generation.sampling import Sampling, row_keys
from attnops_lm.generation.state import GenerationRows, LogitsProcessor, Rules
from attnops_lm.generation.text import Streamer, TextDecoder, TextOfRow


class Generated(NamedTuple):
    """The result of `generate`: for each row of the prompt ``num_return_sequences`` consecutive rows.

    Attributes:
        sequences: int32 [B, P + n]: the prompt as it was given, followed by ``tokens``.
        tokens: int32 [B, n], the generated tokens, and padding after a row's end; n is the length of the longest row.
        lengths: int32 [B], the number of generated tokens per row, its end token included.
        past_key_values: the caches, which hold all tokens but the last of each row; None after a beam search.
        scores: after a beam search, float32 [B], log-probability / length ** length_penalty; else None.
        drafted: int32 [B], the number of tokens that were drafted.
        accepted: int32 [B], the number of drafted tokens that were right.
        steps: the number of calls of the model after the prompt.
        texts: with ``tokenizer``, the text of each row, up to a stop string and without end tokens; else None.
    """

    sequences: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    past_key_values: Caches | None
    scores: np.ndarray | None
    drafted: np.ndarray
    accepted: np.ndarray
    steps: int
    texts: list[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The checked arguments of one call of `generate`."""

    model: Any
    config: GenerationConfig
    prompt: Prompt
    eos: tuple[int, ...]
    pad: int
    most: int  # the most tokens to generate per row
    key: jax.Array | None
    trace: bool
    processor: LogitsProcessor | None
    caches: Caches | None
    streamer: Streamer | None
    tokenizer: TextDecoder | None
    chunk: int | None

    @property
    def drafts(self) -> int:
        """g, tokens that are drafted at a time."""
        return self.config.prompt_lookup_num_tokens or 0

    def rules(self) -> Rules:
        """The rules, arguments of the programs: NumPy arrays, since creating each JAX array would compile a program."""
        c = self.config
        sampling = Sampling.create()
        if c.do_sample:
            top_p = 1.0 if c.top_p is None else c.top_p
            sampling = Sampling.create(c.temperature, c.top_k or 0, top_p, c.min_p or 0.0)
        # At least two entries, so that no, one or two end tokens share a program.
        ends = (*self.eos, *(-1,) * (2 - len(self.eos)))
        numbers: Any = (
            np.float32(c.repetition_penalty), np.int32(c.min_new_tokens), np.int32(self.most),
            np.asarray(ends, np.int32),
        )  # fmt: skip
        return Rules(sampling, *numbers)


def read_call(
    model: Any,
    input_ids: Any,
    config: GenerationConfig,
    key: jax.Array | None,
    trace: bool,
    processor: LogitsProcessor | None,
    attention_mask: Any,
    caches: Caches | None,
    streamer: Streamer | None,
    tokenizer: TextDecoder | None,
    chunk: int | None,
) -> Call:
    """Check the arguments of `Generation.generate`."""
    model.config.require_head()
    prompt = read_prompt(input_ids, attention_mask, model.config.vocab_size)
    most = config.new_tokens(int(prompt.lengths.max()))
    eos = config.eos_ids(model.config.eos_token_ids)
    pad = next((x for x in (config.pad_token_id, model.config.pad_token_id, *eos[:1]) if x is not None), 0)
    if config.do_sample and key is None:
        raise ValueError("prng_key=None and do_sample=True: tokens are drawn by a key; give prng_key=jax.random.key(0)")
    if config.stops and tokenizer is None:
        raise ValueError(
            f"stop_strings={config.stop_strings!r} and tokenizer=None: they are searched in text; give tokenizer"
        )
    if config.prompt_lookup_num_tokens and model.config.has_linear_layers:
        raise ValueError(
            f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}, but the states of linear layers can't be "
            f"truncated to the tokens that are accepted: leave it out"
        )
    if streamer is not None and config.num_beams > 1:
        raise ValueError(f"streamer is given, and num_beams={config.num_beams}: a beam may be dropped; leave one out")
    times = config.num_return_sequences if config.num_beams == 1 else 1
    if caches is not None and (times > 1 or config.cache_implementation is not None):
        given = {"num_return_sequences": times, "cache_implementation": config.cache_implementation}
        raise ValueError(
            f"past_key_values are given, and {given}: the caches determine rows and storage; leave these out"
        )
    if caches is not None and prompt.starts.any():
        raise ValueError(
            f"past_key_values are given, and attention_mask has left padding {prompt.starts.tolist()}: tokens follow "
            f"those of the caches; pad right"
        )
    prompt = prompt.repeated(times)
    if key is not None:
        jax.eval_shape(lambda key: row_keys(key, len(prompt.lengths)), key)  # raises for another number of keys
    return Call(
        model=model, config=config, prompt=prompt, eos=eos, pad=pad, most=most, key=key, trace=trace,
        processor=processor, caches=caches, streamer=streamer, tokenizer=tokenizer,
        chunk=config.prefill_chunk_size if chunk is None else chunk,
    )  # fmt: skip


def generate(call: Call) -> Generated:
    """Run a checked call of `Generation.generate`."""
    network, leaves = split(call.model)
    settings = Settings(call.drafts, call.config.max_matching_ngram_size, call.processor, call.trace)
    if not call.drafts:
        settings = settings._replace(ngram=1)
    steps = step_program(network, settings)
    append = prompt_program(network, call.trace).append
    room = make_room(
        call.model, call.config, call.prompt.starts, call.prompt.lengths, call.most, call.caches,
        # The tokens that a step appends at a time, and the size of a chunk, if given.
        call.drafts + 1, call.chunk,
    )  # fmt: skip
    size = chunk_size(call.chunk, int(call.prompt.lengths.max()) - 1, room.max_append)
    caches = room.caches
    for new, real in call.prompt.chunks(size):
        caches = append(leaves, caches, new, real)
    tokens: Any = call.prompt.history(room.used, room.length)
    lengths = room.used + call.prompt.lengths
    if call.config.num_beams > 1:
        search = beam_programs(network, call.processor, call.trace)
        pages = None if room.pool is None else BeamPages(room.pool)
        beams = Beams.create(caches, pages, tokens, lengths, call.config.num_beams)
        numbers: Any = np.float32(call.config.length_penalty), np.int32(EARLY[call.config.early_stopping])
        rules = BeamRules(call.rules(), *numbers)
        return _beams_result(call, search.search(leaves, beams, rules))
    rows = GenerationRows.create(caches, tokens, lengths, call.key)
    if call.streamer is None and not call.config.stops:
        stopped = np.zeros(len(call.prompt.lengths), bool)
        rows, _ = steps.run(leaves, rows, call.rules(), stopped, np.int32(call.most))
        texts = None
    else:
        rows, texts = _with_host(call, steps, leaves, rows)
    return _rows_result(call, rows, room, texts)


def _with_host(
    call: Call, steps: StepProgram, leaves: Leaves, rows: GenerationRows
) -> tuple[GenerationRows, list[TextOfRow] | None]:
    """Run steps one by one. After each step the host gets its tokens, and determines which rows have a stop string."""
    B, rules, one = len(call.prompt.lengths), call.rules(), np.int32(1)
    texts = None if call.tokenizer is None else [TextOfRow(call.tokenizer, call.config.stops) for _ in range(B)]
    columns = _Columns(call, B)
    stopped = np.zeros(B, bool)
    while True:
        rows, news = steps.run(leaves, rows, rules, stopped.copy(), one)
        tokens, counts, finished = (on_host(x) for x in news)
        finished = finished.copy()
        for b in range(B):
            new = tokens[b, : counts[b]].tolist()
            for i, token in enumerate(new):
                if texts is not None and token not in call.eos:
                    texts[b].push(token)
                if texts is not None and texts[b].stopped:
                    stopped[b] = finished[b] = True
                    new = new[: i + 1]
                    break
            columns.add(b, new)
        columns.show(finished)
        if finished.all():
            break
    if call.streamer is not None:
        call.streamer.end()
    # Drafts that were right may go beyond the token that completes a stop string.
    lengths = rows.first + jnp.asarray([len(row) for row in columns.rows], jnp.int32)
    caches = truncated(rows.caches, lengths - 1) if call.drafts else rows.caches
    return dataclasses.replace(rows, caches=caches, lengths=lengths), texts


class _Columns:
    """The generated tokens. Rows may grow by different numbers; a streamer is given one token of each row at a time."""

    def __init__(self, call: Call, batch: int) -> None:
        self.streamer, self.pad = call.streamer, call.pad
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.shown = 0
        if self.streamer is not None:
            self.streamer.put(call.prompt.tokens)

    def add(self, row: int, tokens: list[int]) -> None:
        self.rows[row] += tokens

    def show(self, finished: np.ndarray) -> None:
        lengths = [len(row) for row in self.rows]
        running = [n for n, end in zip(lengths, finished, strict=True) if not end]
        ready = min(running) if running else max(lengths)
        while self.streamer is not None and self.shown < ready:
            column = [row[self.shown] if self.shown < len(row) else self.pad for row in self.rows]
            self.streamer.put(np.asarray(column, np.int32))
            self.shown += 1


def _rows_result(call: Call, rows: GenerationRows, room: Room, texts: list[TextOfRow] | None) -> Generated:
    first, lengths = on_host(rows.first), on_host(rows.lengths)
    _check_fit(rows.caches)
    tokens = _generated(on_host(rows.tokens), first, lengths, call.pad)
    count = lengths - first
    if texts is not None:
        for text in texts:
            text.finish()
    return Generated(
        sequences=np.concatenate([call.prompt.tokens, tokens], axis=1),
        tokens=tokens,
        lengths=count,
        past_key_values=rows.caches,
        scores=None,
        drafted=on_host(rows.drafted),
        accepted=on_host(rows.accepted),
        steps=int(rows.steps),
        texts=[text.text for text in texts] if texts is not None else _texts(call, tokens, count),
    )


def _beams_result(call: Call, beams: Beams) -> Generated:
    n = call.config.num_return_sequences
    _check_fit(beams.caches)
    first = np.repeat(on_host(beams.first).reshape(beams.scores.shape)[:, 0], n)
    lengths = on_host(beams.ended_lengths)[:, :n].reshape(-1)
    kept = on_host(beams.ended_tokens)[:, :n].reshape(len(lengths), -1)
    tokens, count = _generated(kept, first, lengths, call.pad), lengths - first
    zeros = np.zeros_like(count)
    return Generated(
        sequences=np.concatenate([np.repeat(call.prompt.tokens, n, axis=0), tokens], axis=1),
        tokens=tokens,
        lengths=count,
        past_key_values=None,
        scores=on_host(beams.ended_scores)[:, :n].reshape(-1),
        drafted=zeros,
        accepted=zeros,
        steps=int(beams.steps),
        texts=_texts(call, tokens, count),
    )


def _generated(tokens: np.ndarray, first: np.ndarray, lengths: np.ndarray, pad: int) -> np.ndarray:
    """Tokens [B, S] from ``first [B]`` to ``lengths [B]``, as int32 [B, n], padded."""
    result = np.full((len(first), int((lengths - first).max())), pad, np.int32)
    for row, history, begin, end in zip(result, tokens, first, lengths, strict=True):
        row[: end - begin] = history[begin:end]
    return result


def _texts(call: Call, tokens: np.ndarray, count: np.ndarray) -> list[str] | None:
    if call.tokenizer is None:
        return None
    rows = (row[:n].tolist() for row, n in zip(tokens, count, strict=True))
    return [call.tokenizer.decode([token for token in row if token not in call.eos]) for row in rows]


def on_host(x: jax.Array) -> np.ndarray:
    """The whole array as NumPy, also with several processes."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def _check_fit(caches: Caches) -> None:
    """Raise if the caller's caches had overflowed before the call; `make_room` made room for all new tokens."""
    if rows := np.flatnonzero(on_host(counted(caches).overflowed)).tolist():
        raise ValueError(f"past_key_values have overflowed in rows {rows}: tokens are missing in them")
