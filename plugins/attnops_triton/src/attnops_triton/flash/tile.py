"""The scores of one tile inside a kernel, as Triton source: loads, products, soft cap, bias, mask and dropout.

Variables of all kernels:
- ``b``, ``h``: the indices of the batch and the query head;
- ``q0``, ``kv0``: the tile's first query and key;
- ``qi`` [bq], ``ki`` [bk]: the indices of its queries and keys; ``qx``, ``kx``: the same, broadcasting to the tile;
- ``s``: its scores; ``ok``: whether a score is not masked.

A tile is [queries, keys], or transposed [keys, queries].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnops.dropout import dropout_threshold, spread_of_keys
from attnops.kernels import Elementwise
from attnops_triton.flash.bits import WORD
from attnops_triton.flash.operands import Operand, base
from attnops_triton.flash.plan import LOG2E, FlashPlan, TileSizes, cdiv
from attnops_triton.flash.sizes import is_even
from attnops_triton.language.source import SourceWriter, number
from attnops_triton.language.translate import TYPES, derivative, tanh, traced, translate

if TYPE_CHECKING:
    from attnops.typing import BackendPlan


@dataclasses.dataclass(frozen=True)
class TileWriter:
    """Writes the code of one tile.

    Attributes:
        write: the kernel's lines.
        plan: the plan of the call.
        bq: queries per tile.
        bk: keys per tile.
        even: whether the tile sizes divide the lengths, so that no tile reaches beyond the last token.
        shapes: the shapes of the kernel's operands, by name.
        batched: by operand's name, Triton source that is 1 if the operand has a batch axis, and 0 if all batches share
            it.
        transposed: whether keys come before queries.
    """

    write: SourceWriter
    plan: FlashPlan
    bq: int
    bk: int
    even: bool
    shapes: Mapping[str, tuple[int, ...]]
    batched: Mapping[str, str]
    transposed: bool = False

    @classmethod
    def make(
        cls,
        write: SourceWriter,
        plan: FlashPlan,
        tiles: TileSizes,
        operands: Sequence[Operand],
        transposed: bool = False,
    ) -> TileWriter:
        """The tile of a kernel with these operands."""
        write.integer("T", plan.T)
        write.integer("S", plan.S)
        bits = write.integer("batched", sum((o.array.shape[0] > 1) << i for i, o in enumerate(operands)))
        batched = {o.name: f"({bits} >> {i} & 1)" for i, o in enumerate(operands)}
        shapes = {o.name: tuple(o.array.shape) for o in operands}
        return cls(write, plan, tiles.bq, tiles.bk, is_even(plan, tiles), shapes, batched, transposed)

    def base(self, name: str, size: str) -> str:
        """The pointer to the ``size`` elements of ``b`` and ``h`` in an array [B or 1, H or 1, …]."""
        return base(self.write, name, self.batched.get(name, ""), self.shapes[name][1], size)

    @property
    def shape(self) -> str:
        """The tile's shape, as Triton source."""
        return f"[{self.bk}, {self.bq}]" if self.transposed else f"[{self.bq}, {self.bk}]"

    def queries(self) -> None:
        """Write ``qi`` and ``qx``, from ``q0``."""
        self.write(f"qi = q0 + tl.arange(0, {self.bq})", f"qx = qi{self.broadcast('q')}")

    def keys(self) -> None:
        """Write ``ki`` and ``kx``, from ``kv0``."""
        self.write(f"ki = kv0 + tl.arange(0, {self.bk})", f"kx = ki{self.broadcast('kv')}")

    def load(self, name: str, axis: str, heads: int, head: str, dim: int, edge: bool) -> None:
        """Load the tile's rows of an array [B, length, heads, dim], in chunks of dim: ``name_0``, ``name_1``.

        Args:
            name: prefix of the chunks' names and of the pointer's, ``name_ptr``.
            axis: "q" or "kv".
            heads: number of heads of the array.
            head: the variable of the head's index.
            dim: D or Dv.
            edge: whether the tile may reach beyond the last token.
        """
        length, first, index = self._axis_variables(axis)
        stride = heads * dim
        # Under `jax.vmap` all slices may share one array.
        batch = f"(b * {self.batched[name]}).to(tl.int64) * {length} * {stride}"
        at = f"{name}_ptr + {batch} + {head}.to(tl.int64) * {dim}"
        self.write(f"{name}_at = {at} + {first}.to(tl.int64) * {stride}")
        for i, (start, width) in enumerate(self.plan.chunks(dim)):
            columns = f"({start} + tl.arange(0, {width}))[None, :]"
            conditions = [f"({index} < {length})[:, None]"] * edge + [f"({columns} < {dim})"] * (start + width > dim)
            masked = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
            self.write(f"{name}_{i} = tl.load({name}_at + ({index} - {first})[:, None] * {stride} + {columns}{masked})")

    def store(self, name: str, values: str, axis: str, heads: int, head: str, dim: int, dtype: str) -> None:
        """Store the chunks ``values_0``, ``values_1`` where `load` would load them from."""
        length, first, index = self._axis_variables(axis)
        stride = heads * dim
        at = f"{name}_ptr + b.to(tl.int64) * {length} * {stride} + {head}.to(tl.int64) * {dim}"
        self.write(f"{name}_at = {at} + {first}.to(tl.int64) * {stride}")
        edge = not self.even
        for i, (start, width) in enumerate(self.plan.chunks(dim)):
            columns = f"({start} + tl.arange(0, {width}))[None, :]"
            conditions = [f"({index} < {length})[:, None]"] * edge + [f"({columns} < {dim})"] * (start + width > dim)
            masked = f", mask={' & '.join(conditions)}" if conditions else ""
            at = f"{name}_at + ({index} - {first})[:, None] * {stride} + {columns}"
            self.write(f"tl.store({at}, {values}_{i}.to({dtype}){masked})")

    def load_token(self, name: str, axis: str, edge: bool) -> None:
        """Load the tile's elements of an array [B or 1, H or 1, T or S] as ``name``, broadcasting to the tile.

        Tokens beyond the last one have its element: with zeros a function might divide by 0.
        """
        length, _, index = self._axis_variables(axis)
        index = f"tl.minimum({index}, {length} - 1)" if edge else index
        self.write(f"{name} = tl.load({self.base(name, length)} + {index}){self.broadcast(axis)}")

    def load_statistics(self, edge: bool, names: Sequence[str] = ("m", "log2_sum", "delta")) -> None:
        """Load the statistics of the backward pass per query: ``m``, ``log2_sum`` and ``delta``, [bq] each."""
        for name in names:
            other = 'float("inf")' if name == "m" else "0.0"
            masked = f", mask=qi < T, other={other}" if edge else ""
            self.write(f"{name} = tl.load({self.base(name, 'T')} + qi{masked})")

    def load_values(self, axis: str, edge: bool) -> None:
        """Load the values of masks, biases and dropout per query, per key, or per head.

        Args:
            axis: "q", "kv", or "" for heads.
            edge: whether the tile may reach beyond the last token.
        """
        scoring = self.plan.scoring
        for prefix, function in (("mask", scoring.mask), ("bias", scoring.bias)):
            if function is None:
                continue
            for i, (axes, dtype) in enumerate(zip(function.values, function.dtypes, strict=True)):
                name = f"{prefix}{i}"
                if next((a for a in ("q", "kv") if a in axes), "") != axis:
                    continue
                if axis:
                    self.load_token(name, axis, edge)
                else:
                    self.write(f"{name} = tl.load({self.base(name, '1')})")
                if np.dtype(dtype) == np.bool_:
                    self.write(f"{name} = {name} != 0")
                elif np.dtype(dtype).itemsize != 4:
                    self.write(f"{name} = {name}.to({TYPES[np.dtype(dtype).name]})")
        if axis == "q" and scoring.dropout_prob:
            self.load_token("dropout", "q", edge)

    @property
    def has_values_by_head(self) -> bool:
        """Whether some value of masks or biases differs between heads."""
        functions = (("mask", self.plan.scoring.mask), ("bias", self.plan.scoring.bias))
        names = [f"{prefix}{i}" for prefix, x in functions if x is not None for i in range(len(x.values))]
        return any(self.shapes[name][1] > 1 for name in names)

    def product(self, name: str, queries: str, keys: str, dim: int) -> None:
        """Write ``name``, the products of rows of queries and of keys, summed over the chunks of ``dim``."""
        # A GPU rounds a product and its transpose equally. NumPy, which the interpreter uses, does not: with large
        # scores the weights would differ from those of the forward pass.
        swap = self.transposed and self.plan.interpret
        a, b = (keys, queries) if self.transposed and not swap else (queries, keys)
        for i in range(len(self.plan.chunks(dim))):
            self.dot(name, f"{a}_{i}", f"tl.trans({b}_{i})", i > 0)
        if swap:
            self.write(f"{name} = tl.trans({name})")

    def dot(self, name: str, a: str, b: str, add: bool) -> None:
        """Write ``name = a · b``, or ``name += a · b``."""
        precision = ""
        if self.plan.dtype == "float32":
            precision = f', input_precision="{"tf32" if self.plan.tf32 else "ieee"}"'
        self.write(f"{name} = tl.dot({a}, {b}{f', {name}' if add else ''}{precision})")

    def apply_cap_and_bias(self) -> None:
        """Apply scale, soft cap and bias to ``s``."""
        scoring, write = self.plan.scoring, self.write
        if self.plan.scales_first:
            write(f"s = s * {number(float(self.plan.scale))}")
        if scoring.cap is not None:
            cap = float(scoring.cap)
            write(f"x = s * {number(1 / cap)}")
            write(f"curve = {tanh(write, 'x')}", f"s = {number(cap)} * curve")
        if scoring.bias is not None:
            (biased,) = translate(write, traced(scoring.bias, 0), self._arguments("bias", scoring.bias))
            write("unbiased = s", f"s = {biased} + tl.full({self.shape}, 0.0, tl.float32)")
        if scoring.table:
            table = self.base("table", "(T + S - 1)")
            write(f"s = s + tl.load({table} + (kx - qx + (T - 1)), mask=(kx < S) & (qx < T), other=0.0)")
        if scoring.array:
            write(f"s = s + {self.load_per_score('array', '0.0')}.to(tl.float32)")

    def load_per_score(self, name: str, other: str) -> str:
        """Triton source that loads the tile of an array [B or 1, H or 1, T, S]; ``other`` fills it beyond the ends."""
        corner = f"{self.base(name, 'T * S')} + q0.to(tl.int64) * S + kv0.to(tl.int64)"
        masked = "" if self.even else f", mask=(qx < T) & (kx < S), other={other}"
        return f"tl.load({corner} + (qx - q0) * S + (kx - kv0){masked})"

    def allowed(self, edge: bool) -> bool:
        """Write ``ok``, True where a score of a PARTIAL tile is not masked. Returns False if nothing masks scores; then
        nothing is written.

        Args:
            edge: whether keys beyond the last are masked.
        """
        scoring, plan, write = self.plan.scoring, self.plan, self.write
        conditions = []
        if scoring.mask is not None:
            for i in range(scoring.dense):
                write(f"dense{i} = {self.load_per_score(f'dense{i}', '0')} != 0")
            arguments = self._arguments("mask", scoring.mask) + [f"dense{i}" for i in range(scoring.dense)]
            conditions += translate(write, traced(scoring.mask, scoring.dense), arguments)
        if plan.bit_mask:
            conditions.append(self.bits())
        if edge and not self.even:
            conditions.append("(kx < S)")
        if scoring.has_fully_masked_tokens and not self.even:
            # A query beyond the last one must not count as one that sees a key.
            conditions.append("(qx < T)")
        if not conditions:
            return False
        write(f"ok = {' & '.join(conditions)} & tl.full({self.shape}, 1, tl.int1)")
        return True

    def bits(self) -> str:
        """Write the load of the tile's bits, which are at index ``bits_at`` of ``words``. Returns the condition."""
        words = cdiv(self.bk, WORD)
        at = f"words_ptr + bits_at.to(tl.int64) * {self.bq * words} + (qx - q0) * {words} + (kx - kv0) // {WORD}"
        self.write(f"bit = (tl.load({at}) >> ((kx - kv0) % {WORD})) & 1")
        return "(bit != 0)"

    def weights(self, m: str, log2_sum: str = "") -> None:
        """Write ``p``, the weights ``exp(s − m)``, or ``exp(s − m) / sum``.

        Args:
            m: variable [bq], in units of ``s``.
            log2_sum: variable [bq], log2 of the sum; empty for none.
        """
        unit, by_query = number(self.plan.score_unit * LOG2E), self.broadcast("q")
        if self.plan.scoring.has_bias or self.plan.dtype == "float32":
            # Subtract before multiplying, which is exact: with large biases a difference of products would not be.
            self.write(f"p = tl.exp2((s - {m}{by_query}) * {unit}{f' - {log2_sum}{by_query}' if log2_sum else ''})")
        else:
            self.write(f"p = tl.exp2(s * {unit} - ({m} * {unit}{f' + {log2_sum}' if log2_sum else ''}){by_query})")

    def dropout(self) -> None:
        """Write ``keep``, which weights dropout keeps."""
        spread = spread_of_keys(self.plan.scoring.dropout_step)
        self.write(
            f"x = dropout + (ki.to(tl.uint32) * {spread}){self.broadcast('kv')}",
            f"x = (x ^ (x >> 16)) * {0x85EBCA6B}",
            f"x = (x ^ (x >> 13)) * {0xC2B2AE35}",
            "x = x ^ (x >> 16)",
            f"keep = (x >> 8).to(tl.int32) >= {dropout_threshold(self.plan.scoring.dropout_prob)}",
        )

    def zero_masked_tokens(self, axis: str, *names: str) -> None:
        """Zero the queries, or keys, that are fully masked in the tile, since they may hold NaN."""
        if not self.plan.scoring.has_fully_masked_tokens:
            return
        reduced_axis = 1 if (axis == "kv") == self.transposed else 0
        # A bitwise and: for `tl.where` on operands of a product the compiler fails on some architectures.
        bits, dtype = f"tl.int{8 * self.plan.itemsize}", f"tl.{self.plan.dtype}"
        self.write(f"any_{axis} = (0 - tl.reduce(ok.to(tl.int32), {reduced_axis}, largest)).to({bits})[:, None]")
        for name in names:
            self.write(f"{name} = ({name}.to({bits}, bitcast=True) & any_{axis}).to({dtype}, bitcast=True)")

    def cap_and_bias_vjp(self) -> list[int]:
        """Write ``ds``, the gradient of the unscaled products, from the gradient of the scores.

        Also writes ``d_bias0``, …, the gradients of the floating-point values of an elementwise bias. Returns the
        indices of these values.
        """
        scoring, write = self.plan.scoring, self.write
        wanted: list[int] = []
        if scoring.bias is not None:
            jaxpr, wanted = derivative(scoring.bias)
            arguments = self._arguments("bias", scoring.bias, "unbiased")
            d_scores, *d_values = translate(write, jaxpr, [*arguments, "ds"])
            for i, text in zip(wanted, d_values, strict=True):
                write(f"d_bias{i} = {text} + tl.full({self.shape}, 0.0, tl.float32)")
            write(f"ds = {d_scores} + tl.full({self.shape}, 0.0, tl.float32)")
        if scoring.cap is not None:
            write("ds = ds * (1.0 - curve * curve)")
        return wanted

    def _arguments(self, prefix: str, function: Elementwise, scores: str = "s") -> list[str]:
        b = f"(b % {self.write.integer('inner', self.plan.inner)})"
        # Tokens beyond the last one have its index, so that no index is out of range.
        q, kv = ("qx", "kx") if self.even else ("tl.minimum(qx, T - 1)", "tl.minimum(kx, S - 1)")
        return [scores, b, "h", q, kv, *(f"{prefix}{i}" for i in range(len(function.values)))]

    def _axis_variables(self, axis: str) -> tuple[str, str, str]:
        """The variables of the length, the tile's first token and the indices of its tokens."""
        return ("T", "q0", "qi") if axis == "q" else ("S", "kv0", "ki")

    def broadcast(self, axis: str) -> str:
        """The subscript that broadcasts a variable per query or per key to the tile."""
        return "[:, None]" if (axis == "q") != self.transposed else "[None, :]"


def dtype(plan: BackendPlan) -> str:
    """The dtype of the operands of products, as Triton source."""
    return f"tl.{plan.dtype}"
