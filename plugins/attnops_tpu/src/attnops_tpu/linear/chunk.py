"""What both kernels compute of a chunk: scores, what the state has for its tokens, and the delta rule's updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from attnops_tpu.linear.inverse import inverses
from attnops_tpu.linear.plan import LANES, LinearPlan
from attnops_tpu.linear.prepare import CHUNK, OF_HEAD, OF_PAIR, ROWS
from attnops_tpu.linear.products import BY_COLUMNS, BY_ROWS, parts, product

Parts: TypeAlias = list[jax.Array]


class Gates:
    """The values of a step's tokens.

    Matrix products copy columns to the lanes: the cross-lane unit would be busier with them than all others.
    """

    def __init__(self, refs: Any) -> None:
        self._rows = refs.rows
        self._columns = product([refs.columns[0, 0, 0]], [refs.copies[...]], 1, BY_COLUMNS)

    def row(self, name: str, pair: int) -> jax.Array:
        """[1, 128]: those of the tokens of a pair of heads; "whole" of the first one."""
        return self._row(ROWS.index(name), pair)

    def whole(self, head: int) -> jax.Array:
        """[1, 128]: what is kept of a head's state."""
        return self._row(ROWS.index("whole") + head % 2, head // 2)

    def of_pair(self, name: str, pair: int) -> jax.Array:
        """[C, 128]: a token's value, of the first head in one half of the lanes and of the second in the other."""
        return self._block(OF_PAIR.index(name), pair)

    def of_head(self, name: str, head: int, width: int) -> jax.Array:
        """[C, width]: a token's value."""
        block = self._block(len(OF_PAIR) + 2 * OF_HEAD.index(name) + head % 2, head // 2)
        return jnp.concatenate([block] * (width // LANES), axis=1)

    def _row(self, row: int, pair: int) -> jax.Array:
        x: jax.Array = self._rows[0, 0, 0, row : row + 1, part(pair, LANES)]
        return x

    def _block(self, i: int, pair: int) -> jax.Array:
        return self._columns[part(pair, CHUNK), part(i, LANES)]


class Past(NamedTuple):
    """What the state before a chunk has for its tokens, [C, Dv] float32.

    Attributes:
        of_query: the state's values for queries, q S; forward only.
        of_key: those for keys; with the delta rule only.
        of_gradient: those of the gradient of the state after the chunk for keys; backward only.
    """

    of_query: Any
    of_key: Any
    of_gradient: Any = None


class Kept(NamedTuple):
    """What the forward kernel keeps for the backward one, of N chunks.

    Attributes:
        states: [B, N, H, D, Dv] float32, before each chunk.
        inverses: [B, H / h, N, p · C, 128], (I + M B)⁻¹ of each pair, float32, or bfloat16 where products of single
            parts need no more; None without the delta rule.
    """

    states: Any
    inverses: Any


class Chunk(NamedTuple):
    """What is computed of a chunk, in lists by head or, where it says so, by pair of heads, [C, 128] side by side.

    Attributes:
        gates: the values of the tokens.
        queries: their `parts`, [C, D].
        keys: theirs.
        scores: by pair, [q k, k k], products of queries with keys and, with the delta rule, of keys with keys.
        decays: by pair, the products of decays after token j up to token i, 0 for i < j.
        past: what the state has for the tokens.
        inverses: by pair, (I + M B)⁻¹, with M the strictly lower k k ∘ decays, and B the betas; or None.
        solutions: by pair, their parts; or None.
        solved: (I + M B)⁻¹ (V − kept k S), or the values; [C, Dv].
        updates: B of it, or the values.
    """

    gates: Gates
    queries: list[list[jax.Array]]
    keys: list[list[jax.Array]]
    scores: list[list[jax.Array]]
    decays: list[jax.Array]
    past: list[Past]
    inverses: Any
    solutions: Any
    solved: list[jax.Array]
    updates: list[jax.Array]


def chunk(plan: LinearPlan, refs: Any, look_up: Callable[[int, Parts, Parts], Past], kept: Any = None) -> Chunk:
    """A chunk of some heads.

    The matrix unit keeps the order of the program. So each phase has all heads before the next one begins: a phase
    hides the delay of the products of the one before.

    Args:
        plan: what is static.
        refs: ``query``, ``key``, ``value``, ``rows``, ``columns`` and ``copies`` of a kernel's references.
        look_up: a function of a head and the parts of its queries and keys.
        kept: the inverses of the chunk's systems, see `Kept`, where they are known.
    """
    count, heads = plan.passes, range(plan.heads)
    gates = Gates(refs)
    keys, queries = (
        [parts(x[0, :, part(i * plan.keys // plan.heads, plan.D)], count) for i in heads]
        for x in (refs.key, refs.query)
    )
    scores = [_scores(plan, [queries[i] for i in pair], [keys[i] for i in pair]) for pair in pairs(plan)]
    past = [look_up(i, queries[i], keys[i]) for i in heads]
    decays = [_decays(gates, i) for i in range(len(scores))]
    solved = updates = [refs.value[0, :, part(i, plan.Dv)] for i in heads]
    inverted = solutions = None
    if plan.beta:
        if kept is None:
            # With B the diagonal matrix of betas, (I + B M)⁻¹ B = B (I + M B)⁻¹, whose betas are along the lanes.
            systems = [
                jnp.where(is_before(), found[1] * decay * gates.row("beta", i), 0.0)
                for i, (found, decay) in enumerate(zip(scores, decays, strict=True))
            ]
            inverted = inverses(systems, count)
        else:
            inverted = [kept[part(i, CHUNK)] for i in range(len(scores))]
        solutions = [parts(x, count) for x in inverted]
        targets = [
            x.astype(jnp.float32) - past[i].of_key * gates.of_head("kept", i, plan.Dv) for i, x in enumerate(updates)
        ]
        solved = [product(half(solutions[i // 2], i), parts(x, count), count) for i, x in enumerate(targets)]
        updates = [x * gates.of_head("beta", i, plan.Dv) for i, x in enumerate(solved)]
    return Chunk(gates, queries, keys, scores, decays, past, inverted, solutions, solved, updates)


def pairs(plan: LinearPlan) -> list[tuple[int, int]]:
    """The heads of each pair; one that lacks its second head has the first twice."""
    return [(i, min(i + 1, plan.heads - 1)) for i in range(0, plan.heads, 2)]


def _scores(plan: LinearPlan, queries: list[list[jax.Array]], keys: list[list[jax.Array]]) -> list[jax.Array]:
    """Of a pair of heads, [C, 128]: products of queries with keys, and with the delta rule of keys with keys."""
    rows = [*queries, *(keys if plan.beta else [])]
    found = product(stacked(rows), stacked(keys), plan.passes, BY_ROWS)
    is_first = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1) < CHUNK
    cut = [found[part(i, CHUNK)] for i in range(len(rows))]
    return [jnp.where(is_first, cut[i], cut[i + 1]) for i in range(0, len(cut), 2)]


def past(plan: LinearPlan, rough: int, state: jax.Array, query: Parts, key: Parts) -> Past:
    """What a state [D, Dv] has for queries, to ``rough``, and for keys."""
    states = parts(state, plan.passes)
    if not plan.beta:
        return Past(product(query, states, rough), None)
    found = product(stacked([query, key]), states, rough)
    of_query, of_key = found[:CHUNK], found[CHUNK:]
    return Past(of_query, of_key if rough == plan.passes else of_key + product(key, states[1:], plan.passes - 1))


def _decays(gates: Gates, pair: int) -> jax.Array:
    """The products of decays after token j up to token i, 0 for i < j; [C, 128] of a pair of heads."""

    def difference(name: str) -> jax.Array:
        return gates.of_pair(name, pair) - gates.row(name, pair)

    keeps = (difference("resets") == 0) & ~is_before(reverse=True)
    return jnp.exp(jnp.where(keeps, difference("coarse") + difference("fine"), -jnp.inf))


def is_before(reverse: bool = False) -> jax.Array:
    """Whether token j is before token i; the reverse: whether i is before j. [C, 128]."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    column = lane & (CHUNK - 1)
    return row < column if reverse else column < row


def part(i: int, width: int) -> slice:
    """The i-th ``width`` lanes or rows."""
    return slice(i * width, (i + 1) * width)


def half(x: list[jax.Array], head: int) -> list[jax.Array]:
    """A head's half of the lanes of a pair's parts."""
    return [one[:, part(head % 2, CHUNK)] for one in x]


def stacked(matrices: list[list[jax.Array]]) -> list[jax.Array]:
    """The parts of matrices one below the other."""
    return [jnp.concatenate(each, axis=0) for each in zip(*matrices, strict=True)]
