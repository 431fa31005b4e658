"""Where the tokens of a row lie, and loads of a tile of keys and values, as Triton source.

Variables: ``row``, the row of the cache; ``k``, the kv head; ``kv0``, the first slot of the tile; ``slot`` [bk], its
slots; ``block`` and ``within``, the block that a slot is in and its place there, for the whole tile or for each slot;
``present``, whether the row's page is in the table.
"""

from __future__ import annotations

import dataclasses

from attnops_triton.caches.codec import decode
from attnops_triton.caches.plan import CachePlan, HeadDimChunk
from attnops_triton.language.source import SourceWriter


@dataclasses.dataclass(frozen=True)
class LoadWriter:
    """Writes the code of loads.

    Attributes:
        write: the kernel's lines.
        plan: the plan of the call.
    """

    write: SourceWriter
    plan: CachePlan

    @property
    def slots(self) -> str:
        """Slots per block."""
        return str(self.plan.page) if self.plan.page else "S"

    def locate(self, has_pages: bool) -> None:
        """Write ``slot``, ``block`` and ``within``, and for pages ``present``.

        Args:
            has_pages: whether all of the tile's pages are in the table.
        """
        write, plan, bk = self.write, self.plan, self.plan.tiles.bk
        write(f"slot = kv0 + tl.arange(0, {bk})")
        base = " + tl.load(base_ptr)"
        if not plan.page:
            write(f"block = (row{base}).to(tl.int64)", "within = slot")
            return
        pages = write.integer("pages", plan.pages)
        if plan.by_page:
            write(f"page = kv0 // {plan.page}", f"within = kv0 % {plan.page} + tl.arange(0, {bk})")
        else:
            write(f"page = slot // {plan.page}", f"within = slot % {plan.page}")
        if not plan.by_page and not plan.is_even:
            write(f"page = tl.minimum(page, {pages} - 1)")
        write(f"entry = tl.load(table_ptr + row.to(tl.int64) * {pages} + page)")
        if not has_pages:
            blocks = write.integer("blocks", plan.blocks)
            write(f"present = (entry >= 0) & (entry < {blocks})", "entry = tl.where(present, entry, 0)")
        write(f"block = (entry{base}).to(tl.int64)")

    @property
    def present(self) -> str:
        """Whether pages are in the table, broadcasting to the tile; empty without pages."""
        if not self.plan.page:
            return ""
        return "present" if self.plan.by_page else "present[None, :]"

    def keys(self, guarded: bool) -> None:
        """Load ``k_0``, ``k_1``, …: chunks of keys [bk, width], in the operands' dtype.

        Args:
            guarded: whether keys that are not ``seen`` are 0 instead of loaded.
        """
        self._load("k", "key", self.plan.key_chunks, 0, self.plan.width, guarded)

    def values(self, guarded: bool) -> None:
        """Load ``v_0``, ``v_1``, …: chunks of values [bk, width]."""
        plan = self.plan
        if plan.is_latent:
            for i in range(len(plan.value_chunks)):
                self.write(f"v_{i} = k_{i}")
        elif plan.is_joined:
            self._load("v", "key", plan.value_chunks, plan.width - plan.Dv, plan.width, guarded)
        else:
            self._load("v", "value", plan.value_chunks, 0, plan.Dv, guarded)

    def scale(self, name: str, guarded: bool) -> str:
        """Load the scales of the tile's keys or values as ``name_scale`` [bk]. Returns its name."""
        guard = ", mask=seen, other=0.0" if guarded else ""
        at = f"{name}_scale_ptr + (block * {self.plan.K} + k) * {self.slots} + within"
        self.write(f"{name}_scale = tl.load({at}{guard})")
        return f"{name}_scale"

    def _load(self, name: str, array: str, chunks: list[HeadDimChunk], feature: int, width: int, guarded: bool) -> None:
        write, plan = self.write, self.plan
        rows = f"(block * {plan.K} + k) * ({self.slots} * {width})"
        if plan.page and not plan.by_page:
            write(f"{name}_at = {array}_ptr + ({rows} + within * {width})[:, None]")
        else:
            write(f"{name}_at = {array}_ptr + {rows} + (within * {width})[:, None]")
        for i, (start, size, stop) in enumerate(chunks):
            columns = f"({start} + tl.arange(0, {size}))[None, :]"
            conditions = ["seen[:, None]"] * guarded + [f"({columns} < {stop})"] * (start + size > stop)
            guard = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
            offset = f" + {feature}" if feature else ""
            write(f"{name}_{i} = tl.load({name}_at{offset} + {columns}{guard})")
            if plan.scales:
                decode(write, f"{name}_{i}", plan.stored, plan.dtype, plan.arch)
            elif plan.stored != plan.dtype:
                write(f"{name}_{i} = {name}_{i}.to(tl.{plan.dtype})")
