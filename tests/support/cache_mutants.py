"""Caches, and calls over them, with one mistake at a time, made by a change of a function's source.

Most are mistakes that other implementations of caches have made.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import NamedTuple

import pytest

from attnops_caches import Cache
from attnops_caches.store import Store

BASE, DENSE, WINDOW = "base:Cache.", "dense:DenseCache.", "window:WindowCache."
PAGED, STORE, LAYOUT, CODEC = "paged:PagedCache.", "store:", "layout:TokenLayout.", "codec:Quantized."
SLOTS, PACKED, READ, CALL = "scores:", "rows:Rows.", "calls.run:", "calls.bind:"


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        where: the function, "module:name".
        old: of its source.
        new: in its place.
        found_by: the features of a problem that finds it, joined by " + ".
    """

    where: str
    old: str
    new: str
    found_by: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the changed function in the place of the right one."""
        # Not a program of the right function, and none of the changed one that outlives the test.
        programs = ((Cache, "_append"), (Cache, "grown"), (Cache, "_with_tokens"), (Store, "write"))
        for cls, program in programs:
            monkeypatch.setattr(cls, program, inspect.unwrap(getattr(cls, program)))
        module_name, _, path = self.where.partition(":")
        owner = importlib.import_module(f"attnops_caches.{module_name}")
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) >= 1, f"{self.where} has no {self.old!r}"
        found: dict[str, object] = {}
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(text, self.where, "exec"), function.__globals__, found)
        monkeypatch.setattr(owner, name, found[name])


MUTANTS = {
    "the queries are at the first positions": Mutant(
        BASE + "query_positions",
        "(lengths - self.starts - query_lengths)[:, None] + place",
        "0 * lengths[:, None] + place",
        "Causal",
    ),
    "all queries of a draft have the last one's window": Mutant(
        BASE + "query_positions",
        "[:, None] + place",
        "[:, None] + 0 * place + query_lengths[:, None] - 1",
        "SlidingWindow + 4 queries",
    ),
    "query_lengths are not counted": Mutant(
        BASE + "query_positions",
        "self.starts - query_lengths)",
        "self.starts - T)",
        "Causal + 4 queries + query_lengths",
    ),
    "queries of left padding see tokens": Mutant(
        BASE + "query_positions",
        "& (position >= 0), position, -1)",
        ", jnp.maximum(position, 0), -1)",
        "left padding + 3 queries + op.step",
    ),
    "positions count left padding": Mutant(
        BASE + "_slots",
        "Slots(-self.starts,",
        "Slots(0 * self.starts,",
        "left padding + Causal",
    ),
    "left padding is seen": Mutant(BASE + "_slots", "jnp.maximum(self.starts, 0)", "0 * self.starts", "left padding"),
    "slots that were never written are counted": Mutant(
        BASE + "_slots",
        "self.lengths, None",
        "0 * self.lengths + self.length, None",
        "SlidingWindow",
    ),
    "a length is guessed from keys that are not 0": Mutant(
        BASE + "_slots",
        "None, None, self.length)",
        "None, jnp.any(self.store.key != 0, axis=(1, 3)), self.length, 1)",
        "3 queries",
    ),
    "a row reads the pages in order": Mutant(
        PAGED + "_keys_values",
        "jnp.clip(self.table, 0, self.pages - 1)",
        "jnp.arange(self.table.size).reshape(self.table.shape) % self.pages",
        "paged",
    ),
    "a page's slots are counted from the row's first": Mutant(
        PAGED + "place", "slot=begin - here", "slot=0 * begin", "paged + op.step"
    ),
    "tokens beyond the first page of an append are lost": Mutant(
        PAGED + "place",
        "kept = jnp.clip(jnp.minimum(end, fits[:, None]) - begin, 0)",
        "kept = jnp.clip(jnp.minimum(end, fits[:, None]) - begin, 0) * (number == number[:, :1])",
        "paged + op.step + 19 queries",
    ),
    "an append has one token only": Mutant(
        DENSE + "place", "0, count)", "0, jnp.minimum(count, 1))", "3 queries + op.step"
    ),
    "an append is one slot off": Mutant(DENSE + "place", "rows, slot)", "rows, slot - 1)", "op.step"),
    "an append of several tokens does not go around a ring": Mutant(
        WINDOW + "place",
        "before = jnp.minimum(fit, R - slot)",
        "before = fit",
        "ring + op.step + 3 queries",
    ),
    "a ring's positions are its slots": Mutant(
        WINDOW + "slots",
        "self._slots(last - newest, newest)",
        "self._slots(0 * newest, 0 * newest + self.length)",
        "ring + SlidingWindow",
    ),
    "a ring's window is forgotten": Mutant(
        WINDOW + "mask",
        "return window if mask is None else mask & window",
        "return mask",
        "ring + 3 queries",
    ),
    "a ring's window is one too small": Mutant(
        WINDOW + "mask",
        "self.window - 1, None",
        "self.window - 2, None",
        "ring",
    ),
    "new tokens overwrite those before them": Mutant(
        STORE + "Store.write", "jnp.where(is_new, given, old)", "given", "op.step + 4 queries + query_lengths"
    ),
    "scales of new tokens are not stored": Mutant(
        STORE + "Store.encoded",
        "if layout.has_token_scales:",
        "if False:",
        "int8 by token_head + op.step",
    ),
    "values are dequantised with the keys' scales": Mutant(
        STORE + "Store.decoded",
        'arrays["value_scale"])',
        'arrays["key_scale"])',
        "int8 by token_head",
    ),
    "scales of values are dropped": Mutant(
        STORE + "Store.decoded",
        'arrays["value_scale"])',
        'jnp.ones_like(arrays["value_scale"]))',
        "int8 by head",
    ),
    "a latent value is the key's last features": Mutant(
        STORE + "Store.decoded", "key[..., : layout.value_head_dim]", "key[..., -layout.value_head_dim :]", "latent"
    ),
    "a joined value begins where the key ends, not where the zeros do": Mutant(
        LAYOUT + "value_of",
        "x[..., self.elements(self.width - self.value_head_dim) :]",
        "x[..., self.elements(self.head_dim) : self.elements(self.head_dim + self.value_head_dim)]",
        "joined",
    ),
    "a vector of zeros is 0 times infinity": Mutant(
        CODEC + "encode",
        "jnp.where(spread == 0, 0.0, wide / jnp.where(spread == 0, 1.0, spread))",
        "jnp.where(spread == 0, jnp.inf, wide / spread)",
        "float8_e4m3fn by token_head + op.step",
    ),
    "int8 is truncated": Mutant(CODEC + "encode", "jnp.round(scaled)", "scaled", "int8 by token_head + op.step"),
    "int8 holds -128": Mutant(CODEC + "encode", "-largest, largest", "-largest - 1, largest", "int8 by head + op.step"),
    "the halves of int4 are exchanged": Mutant(
        CODEC + "parts", "(stored << 4 >> 4, stored >> 4)", "(stored >> 4, stored << 4 >> 4)", "int4 by token_head"
    ),
    "8-bit floats overflow": Mutant(
        CODEC + "encode",
        "jnp.clip(scaled, -largest, largest)",
        "scaled",
        "float8_e4m3fn by tensor + op.step",
    ),
    "tokens are dequantised in bfloat16": Mutant(
        CODEC + "decode",
        "axis=-1).astype(jnp.float32) * self.spread(scale)",
        "axis=-1).astype(jnp.bfloat16).astype(jnp.float32) * self.spread(scale).astype(jnp.bfloat16)",
        "int8 by token_head",
    ),
    "masks by key are by slot": Mutant(
        SLOTS + "_taken",
        "positions.reshape(",
        "(0 * positions + jnp.arange(S)).reshape(",
        "KeyPadding + left padding",
    ),
    "biases are by slot": Mutant(
        CALL + "slot_bias",
        "positions, scores.q_rows)",
        "0 * scores.arrays[0] + jnp.arange(scores.cache.length), scores.q_rows)",
        "ALiBi + ring",
    ),
    "packed queries see tokens of other rows": Mutant(
        SLOTS + "ScorePositions.exists",
        "jnp.where(held, rows, NO_KEY)",
        "jnp.where(held, 2 + 0 * rows, NO_KEY)",
        "packed rows",
    ),
    "windows of rows are those of the first when packed": Mutant(
        "masks.packed:PackedByRow.allowed",
        "row = jnp.maximum(",
        "row = 0 * jnp.maximum(",
        "packed rows + window per batch",
    ),
    "packed queries are counted from the first": Mutant(
        PACKED + "of_queries", "(starts[run + 1] - place)", "1", "packed rows + 3 queries + Causal"
    ),
    "a packed query at a border is the run before's": Mutant(
        PACKED + "of_queries", 'side="right"', 'side="left"', "packed rows"
    ),
    **{
        f"{name} is dropped when the cache is read": Mutant(
            READ + "arrays_of",
            "options = dict(call.options)",
            f'(options := dict(call.options)).pop("{name}", None)\n    options = options',
            found_by,
        )
        for name, found_by in {
            "sinks": "sinks",
            "logits_soft_cap": "soft cap",
            "softmax_scale": "softmax_scale",
            "bias": "ALiBi",
            "mask": "Causal",
        }.items()
    },
}

# Of flash, which reads caches in place.
TILES = "tiles:StoreLoader."
IN_PLACE = {
    "values are dequantised with the keys' scales": Mutant(
        TILES + "load", "at), key_scale, value_scale)", "at), key_scale, key_scale)", "int8 by token_head"
    ),
    "scales are the first head's": Mutant(
        TILES + "_scale", "(at.heads,))[:, None]", "(at.heads,))[:1, None]", "int8 by head"
    ),
    "a latent value is the key's last features": Mutant(
        TILES + "load", "x[..., : stop - i * D]", "x[..., -stop:]", "latent"
    ),
    "the halves of int4 are exchanged": Mutant(
        TILES + "_operands", "layout.codec.parts(x)", "layout.codec.parts(x)[::-1]", "int4 by token_head"
    ),
    "a joined value begins where the key ends, not where the zeros do": Mutant(
        TILES + "load", "_tile(store.key, W - Dv, Dv, at)", "_tile(store.key, D, Dv, at)", "joined"
    ),
    "a row reads the pages in order": Mutant(
        TILES + "_tile",
        "jnp.clip(self.table, 0, store.own_blocks - 1)",
        "jnp.arange(self.table.size).reshape(self.table.shape) % store.own_blocks",
        "paged",
    ),
    "packed queries read the first row": Mutant(
        "flash.attention:_tile_at", "row, slot = slot // backend.slots", "row, slot = 0 * slot", "packed rows"
    ),
}
