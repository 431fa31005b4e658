"""Beam search by the rules of Hugging Face's, compiled as one program, over dense, window and paged caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnops_caches import DenseCache, PagedCache, PagePool, WindowCache
from attnops_linear import StateCache
from attnops_lm.caching import LayerCache
from attnops_lm.generation.programs import Caches, Leaves, Network
from attnops_lm.generation.state import LogitsProcessor, Rules, write

# The values of `early_stopping` as integers, which can be arguments of a program.
EARLY = {True: 1, False: 0, "never": 2}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamPages:
    """The pages of B · k beams.

    Attributes:
        pool: a pool of 2 · B · k rows; the first half are the beams, and the next beams are built in the second half.
    """

    pool: PagePool

    def reserved(self, caches: Caches, lengths: jax.Array) -> tuple[BeamPages, Caches]:
        """Reserve pages for this many tokens per beam, int32 [B · k]."""
        pool = self.pool.reserve(jnp.concatenate([lengths, jnp.zeros_like(lengths)]))
        return BeamPages(pool), _with_table(caches, pool.table[: len(lengths)])

    def taken(self, caches: Caches, parents: jax.Array) -> tuple[BeamPages, Caches]:
        """Beam i becomes a copy of beam ``parents[i]``, int32 [B · k]: full pages are shared, the last is copied."""
        n = len(parents)
        row = jnp.arange(n, dtype=jnp.int32)
        pool, copies = self.pool.fork(parents, n + row)
        pool = pool.release(jnp.arange(2 * n) < n)
        table, lengths, ok = (jnp.roll(x, n, axis=0) for x in (pool.table, pool.lengths, pool.ok))
        pool = dataclasses.replace(pool, table=table, lengths=lengths, ok=ok)
        copied = tuple(cache.copy_pages(copies) for cache in caches if isinstance(cache, PagedCache))
        return BeamPages(pool), _with_table(_with_rows(copied, parents), pool.table[:n])


def _with_table(caches: Caches, table: jax.Array) -> Caches:
    return tuple(cache.with_table(table) for cache in caches if isinstance(cache, PagedCache))


def _with_rows(caches: Caches, rows: jax.Array) -> Caches:
    """Paged caches with their arrays of one entry per row indexed by ``rows``."""
    names = ("lengths", "starts", "overflowed", "table")
    return tuple(
        dataclasses.replace(cache, **{name: getattr(cache, name)[rows] for name in names})  # type: ignore[misc]
        for cache in caches
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """k running and k finished sequences for each of B rows. Caches lack the last token of each running sequence.

    Attributes:
        caches: one per layer, of B · k rows.
        pages: the pool of paged caches; None for other caches.
        tokens: the tokens of running sequences by index, int32 [B · k, S].
        lengths: their lengths, int32 [B · k].
        first: the index of the first generated token, int32 [B · k].
        scores: their log-probabilities, float32 [B, k], largest first; −inf where there are fewer sequences.
        ended_tokens: the tokens of finished sequences, int32 [B, k, S].
        ended_lengths: their lengths, int32 [B, k].
        ended_scores: their log-probability / length ** length_penalty, float32 [B, k], largest first; −inf for none.
        done: whether the search of a row has ended, bool [B].
        steps: calls of the model, int32 [].
    """

    caches: Caches
    pages: BeamPages | None
    tokens: jax.Array
    lengths: jax.Array
    first: jax.Array
    scores: jax.Array
    ended_tokens: jax.Array
    ended_lengths: jax.Array
    ended_scores: jax.Array
    done: jax.Array
    steps: jax.Array

    @classmethod
    def create(
        cls, caches: Caches, pages: BeamPages | None, tokens: jax.Array, lengths: jax.Array, beams: int
    ) -> Beams:
        """The first beams of B rows, from their tokens, and caches that hold all but the last token of each row.

        Args:
            caches: one per layer, of B rows.
            pages: the pool of paged caches; None for other caches.
            tokens: int32 [B, S].
            lengths: int32 [B].
            beams: k.
        """
        return _created(caches, pages, tokens, lengths, beams)


@functools.partial(jax.jit, static_argnames="beams")
def _created(caches: Caches, pages: BeamPages | None, tokens: jax.Array, lengths: jax.Array, beams: int) -> Beams:
    """`Beams.create` in one program."""
    B = len(lengths)
    parents = jnp.repeat(jnp.arange(B, dtype=jnp.int32), beams)
    if pages is None:
        caches = tuple(_taken(cache, parents) for cache in caches)
    else:
        pages, caches = pages.taken(_with_rows(caches, parents), parents * beams)
    none = jnp.full((B, beams), -jnp.inf, jnp.float32)
    tokens, lengths = tokens[parents], lengths[parents]
    return Beams(
        caches=caches, pages=pages, tokens=tokens, lengths=lengths, first=lengths + 0,
        scores=none.at[:, 0].set(0.0), ended_tokens=tokens.reshape(B, beams, -1) + 0,
        ended_lengths=lengths.reshape(B, beams) + 0, ended_scores=none + 0, done=jnp.zeros(B, bool),
        steps=jnp.zeros((), jnp.int32),
    )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamRules:
    """What may differ between calls of one program: `Rules`, and the parameters of beam search.

    Attributes:
        rules: penalty, end tokens and limits of length; its sampling is ignored.
        length_penalty: float32 []; scores are divided by length ** length_penalty.
        early: int32 [], a value of `EARLY`.
    """

    rules: Rules
    length_penalty: jax.Array
    early: jax.Array


def _taken(cache: LayerCache, rows: jax.Array) -> LayerCache:
    if not isinstance(cache, (DenseCache, StateCache, WindowCache)):
        raise ValueError(f"beam search over a {type(cache).__name__} needs its pool: set cache_implementation='paged'")
    return cache.take_rows(rows)


class BeamPrograms:
    """The program of a beam search, compiled once per shape. `beam_programs` makes it.

    Attributes:
        traces: how many times the program was traced.
    """

    def __init__(self, network: Network, processor: LogitsProcessor | None, trace: bool) -> None:
        self.network, self.processor, self.traces = network, processor, 0
        search: Callable[..., Beams] = self._search if trace else self._untraced_search
        self.search = jax.jit(search, donate_argnums=1) if trace else search

    def _search(self, leaves: Leaves, beams: Beams, rules: BeamRules) -> Beams:
        """The beams at the end of the search; ``beams`` is donated."""
        self.traces += 1
        return lax.while_loop(lambda beams: ~beams.done.all(), lambda beams: self._step(leaves, beams, rules), beams)

    def _untraced_search(self, leaves: Leaves, beams: Beams, rules: BeamRules) -> Beams:
        while not beams.done.all():
            beams = self._step(leaves, beams, rules)
        return beams

    def _step(self, leaves: Leaves, beams: Beams, rules: BeamRules) -> Beams:
        B, k = beams.scores.shape
        lengths, pages, caches = beams.lengths, beams.pages, beams.caches
        if pages is not None:
            pages, caches = pages.reserved(caches, lengths)
        last = jnp.take_along_axis(beams.tokens, lengths[:, None] - 1, axis=1)
        real = jnp.repeat((~beams.done).astype(jnp.int32), k)
        logits, caches = self.network(leaves, last, caches, real, jnp.zeros_like(last))
        scores = jax.nn.log_softmax(logits[:, 0], axis=-1)
        scores = rules.rules.processed(scores, beams.tokens, lengths, beams.first, self.processor)
        V = scores.shape[1]
        total = (beams.scores[..., None] + scores.reshape(B, k, V)).reshape(B, k * V)
        # At least k candidates must not be end tokens, and each of the k beams has at most E candidates that are.
        count = min(k * max(2, 1 + rules.rules.ends.shape[0]), k * V)
        total, chosen = lax.top_k(total, count)
        parent, token = chosen // V, (chosen % V).astype(jnp.int32)
        generated = beams.steps + 1
        is_end = rules.rules.is_end(token) | (generated >= rules.rules.most)
        beams = self._with_ended(beams, rules, total, parent, token, is_end)

        running, place = lax.top_k(jnp.where(is_end, -jnp.inf, total), k)
        parents = jnp.take_along_axis(parent, place, axis=1)
        parents = (parents + jnp.arange(B, dtype=jnp.int32)[:, None] * k).reshape(-1)
        if pages is None:
            caches = tuple(_taken(cache, parents) for cache in caches)
        else:
            pages, caches = pages.taken(caches, parents)
        grows = jnp.repeat(~beams.done, k)
        new = jnp.take_along_axis(token, place, axis=1).reshape(-1, 1)
        tokens = write(beams.tokens[parents], new, lengths, grows.astype(jnp.int32))
        return dataclasses.replace(
            beams,
            caches=caches,
            pages=pages,
            tokens=tokens,
            lengths=lengths + grows,
            scores=running,
            done=beams.done | self._is_done(beams, rules, running[:, 0], generated),
            steps=generated,
        )

    def _with_ended(
        self, beams: Beams, rules: BeamRules, total: jax.Array, parent: jax.Array, token: jax.Array, is_end: jax.Array
    ) -> Beams:
        """The beams after finished sequences are replaced by better ones among the k best candidates."""
        B, k = beams.scores.shape
        length = (beams.steps + 1).astype(jnp.float32)
        counts = is_end & ~beams.done[:, None] & (jnp.arange(total.shape[1]) < k)
        score = jnp.where(counts, total / length**rules.length_penalty, -jnp.inf)
        score, place = lax.top_k(jnp.concatenate([beams.ended_scores, score], axis=1), k)
        source = jnp.maximum(place - k, 0)  # the index among the candidates
        rows = jnp.arange(B, dtype=jnp.int32)[:, None] * k + jnp.take_along_axis(parent, source, axis=1)
        rows, new = rows.reshape(-1), jnp.take_along_axis(token, source, axis=1).reshape(-1, 1)
        tokens = write(beams.tokens[rows], new, beams.lengths[rows], jnp.ones_like(rows)).reshape(B, k, -1)
        is_new, old = place >= k, jnp.minimum(place, k - 1)
        lengths = (beams.lengths[rows] + 1).reshape(B, k)
        kept = jnp.take_along_axis(beams.ended_tokens, old[..., None], axis=1)
        return dataclasses.replace(
            beams,
            ended_scores=score,
            ended_tokens=jnp.where(is_new[..., None], tokens, kept),
            ended_lengths=jnp.where(is_new, lengths, jnp.take_along_axis(beams.ended_lengths, old, axis=1)),
        )

    def _is_done(self, beams: Beams, rules: BeamRules, best: jax.Array, generated: jax.Array) -> jax.Array:
        """Whether the search of a row ends, bool [B]; ``best [B]`` is the score of its best running sequence."""
        longest = (rules.early == EARLY["never"]) & (rules.length_penalty > 0)
        length = jnp.where(longest, rules.rules.most, generated).astype(jnp.float32)
        is_full = (beams.ended_scores > -jnp.inf).all(axis=1)
        is_worse = best / length**rules.length_penalty <= beams.ended_scores.min(axis=1)
        ends = is_full & (is_worse | (rules.early == EARLY[True]))
        return ends | (best == -jnp.inf) | (generated >= rules.rules.most)


@functools.lru_cache(maxsize=16)
def beam_programs(network: Network, processor: LogitsProcessor | None, trace: bool) -> BeamPrograms:
    """The program of a model; later calls with the same arguments return the same one."""
    return BeamPrograms(network, processor, trace)
