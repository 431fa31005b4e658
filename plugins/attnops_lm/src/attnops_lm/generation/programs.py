"""The compiled programs of a model: a chunk of the prompt, and a step, which also verifies drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from attnops_lm.caching import LayerCache, truncated
from attnops_lm.generation.speculative import accepted, look_up
from attnops_lm.generation.state import GenerationRows, LogitsProcessor, Rules, write

Caches = tuple[LayerCache, ...]
Leaves = list[jax.Array]


class Settings(NamedTuple):
    """The static settings of a model's step program.

    Attributes:
        drafts: g, the number of tokens that are drafted at a time.
        ngram: the most last tokens by which drafts are looked up.
        processor: the processor of the caller.
        trace: whether the program is compiled.
    """

    drafts: int = 0
    ngram: int = 1
    processor: LogitsProcessor | None = None
    trace: bool = True


class News(NamedTuple):
    """What the last step generated, for the host.

    Attributes:
        tokens: int32 [B, 1 + g]; the first ``counts[b]`` of row b are valid.
        counts: int32 [B].
        finished: bool [B].
    """

    tokens: jax.Array
    counts: jax.Array
    finished: jax.Array


class Network:
    """A model as a function of its weights, so that programs close over nothing that changes. `split` makes it."""

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef

    def __call__(
        self, leaves: Leaves, tokens: jax.Array, caches: Caches, real: jax.Array, logits_at: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """Append the first ``real[b]`` of tokens [B, T] to caches; the logits [B, n, V] are at ``logits_at [B, n]``."""
        model = jax.tree.unflatten(self.treedef, leaves)
        out = model(tokens, past_key_values=caches, query_lengths=jnp.asarray(real), logits_at=logits_at)
        return out.logits, out.past_key_values


class PromptProgram:
    """The program that appends a chunk of a prompt. `prompt_program` makes it.

    Attributes:
        traces: how many times the program was traced.
    """

    def __init__(self, network: Network, trace: bool) -> None:
        self.network, self.traces = network, 0
        self.append: Callable[..., Caches] = jax.jit(self._append, donate_argnums=1) if trace else self._append

    def _append(self, leaves: Leaves, caches: Caches, tokens: jax.Array, real: jax.Array) -> Caches:
        """The caches, which are donated, with the first ``real[b]`` of tokens [B, C] appended."""
        self.traces += 1
        # XLA drops the logits, which nothing uses.
        return self.network(leaves, tokens, caches, real, jnp.zeros((tokens.shape[0], 1), jnp.int32))[1]


class StepProgram:
    """The program that runs steps in a loop. `step_program` makes it.

    Attributes:
        traces: how many times the program was traced.
    """

    def __init__(self, network: Network, settings: Settings) -> None:
        self.network, self.settings, self.traces = network, settings, 0
        self.run: Callable[..., tuple[GenerationRows, News]] = self._untraced_run
        if settings.trace:
            self.run = jax.jit(self._run, donate_argnums=1)

    def _run(
        self, leaves: Leaves, rows: GenerationRows, rules: Rules, stopped: jax.Array, most: jax.Array
    ) -> tuple[GenerationRows, News]:
        """The rows after at most ``most`` steps; ``rows`` is donated, and ``stopped [B]`` says which rows the caller
        ends.
        """
        self.traces += 1
        rows = dataclasses.replace(rows, finished=rows.finished | stopped)
        end = rows.steps + most
        carry = rows, self._no_news(rows)

        def is_left(carry: tuple[GenerationRows, News]) -> jax.Array:
            return (carry[0].steps < end) & ~carry[0].finished.all()

        return lax.while_loop(is_left, lambda carry: self._step(leaves, carry[0], rules), carry)

    def _untraced_run(
        self, leaves: Leaves, rows: GenerationRows, rules: Rules, stopped: jax.Array, most: jax.Array
    ) -> tuple[GenerationRows, News]:
        rows = dataclasses.replace(rows, finished=rows.finished | stopped)
        news = self._no_news(rows)
        for _ in range(int(most)):
            if rows.finished.all():
                break
            rows, news = self._step(leaves, rows, rules)
        return rows, news

    def _no_news(self, rows: GenerationRows) -> News:
        batch = rows.lengths.shape[0]
        return News(
            jnp.zeros((batch, 1 + self.settings.drafts), jnp.int32), jnp.zeros_like(rows.lengths), rows.finished
        )

    def _step(self, leaves: Leaves, rows: GenerationRows, rules: Rules) -> tuple[GenerationRows, News]:
        """One call of the model: the last token of each row and its drafts, if any, and the tokens that follow."""
        g, is_live, n = self.settings.drafts, ~rows.finished, rows.lengths
        tokens, window, draft_count = rows.tokens, rows.last(), jnp.zeros_like(n)
        if g:
            drafts, draft_count = look_up(tokens, n, g, self.settings.ngram)
            draft_count = jnp.where(is_live, jnp.minimum(draft_count, rules.most - (n - rows.first) - 1), 0)
            tokens, window = write(tokens, drafts, n, draft_count), jnp.concatenate([window, drafts], axis=1)
        place = jnp.arange(1 + g, dtype=jnp.int32)
        logits_at = jnp.broadcast_to(place, window.shape)
        real = jnp.where(is_live, 1 + draft_count, 0)
        scores, caches = self.network(leaves, jnp.maximum(window, 0), rows.caches, real, logits_at)

        def pick(scores: jax.Array, i: jax.Array) -> jax.Array:
            return rules.pick(scores, rows, tokens, n + i, self.settings.processor)

        if g:
            picked = jax.vmap(pick, in_axes=(1, 0), out_axes=1)(scores, place)
            accepted_count = accepted(window[:, 1:], draft_count, picked)
        else:
            picked, accepted_count = pick(scores[:, 0], place[0])[:, None], draft_count
        count = jnp.where(is_live, 1 + accepted_count, 0)
        is_end = rules.is_end(picked) & (place < count[:, None])
        has_ended = is_end.any(axis=1)
        count = jnp.where(has_ended, is_end.argmax(axis=1).astype(jnp.int32) + 1, count)
        if g:  # remove rejected drafts, and drafts after an end
            caches = truncated(caches, n - 1 + count)
        grown = dataclasses.replace(
            rows,
            caches=caches,
            tokens=write(tokens, picked, n, count),
            lengths=n + count,
            finished=rows.finished | has_ended | (n + count - rows.first >= rules.most),
            drafted=rows.drafted + draft_count,
            accepted=rows.accepted + jnp.maximum(count - 1, 0),
            steps=rows.steps + 1,
        )
        return grown, News(picked, count, grown.finished)


@functools.lru_cache(maxsize=16)
def prompt_program(network: Network, trace: bool) -> PromptProgram:
    """The program of a model; later calls with the same arguments return the same one."""
    return PromptProgram(network, trace)


@functools.lru_cache(maxsize=16)
def step_program(network: Network, settings: Settings) -> StepProgram:
    """The program of a model and its settings; later calls with the same arguments return the same one."""
    return StepProgram(network, settings)


# One object for all models that differ only in weights, so that later look-ups of programs don't compare models.
_network = functools.lru_cache(maxsize=16)(Network)


def split(model: nnx.Module) -> tuple[Network, Leaves]:
    """A model as a function of its weights, and the list of its weights.

    Each call flattens the model as a pytree, since it may have changed; this costs a tenth of the time of `nnx.split`.
    """
    leaves, treedef = jax.tree.flatten(model)
    return _network(treedef), leaves
