"""A grid step of the kernel over caches: an item, whose scores are transposed if it has many rows of them."""

from __future__ import annotations

import functools

from jax.experimental import pallas as pl

from attnops_tpu.caches.in_place import Outputs
from attnops_tpu.caches.kernel import Kernel
from attnops_tpu.caches.missing import MissingPages
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, as_slots
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.caches.transposed import TransposedKernel
from attnops_tpu.caches.write import Writer
from attnops_tpu.caches.write_prompts import write_prompts


def run_step(plan: CachePlan, refs: CacheRefs) -> None:
    """A grid step of a kernel of one kind of items."""
    refs = refs.of_item(pl.program_id(1) * plan.cores + pl.program_id(0))
    write_prompts(plan, refs)
    run_item(plan, refs)
    finish(refs.outputs(plan))


def finish(*kinds: Outputs | None) -> None:
    """In the last grid step, wait for the outputs in place of the last item of each kind."""
    for outputs in kinds:
        if outputs is not None:
            pl.when(pl.program_id(1) == pl.num_programs(1) - 1)(functools.partial(outputs.wait, outputs.own.item))


def run_item(plan: CachePlan, refs: CacheRefs) -> None:
    """Compute an item."""
    refs = refs._replace(block=refs.block[0], buffers=tuple(map(as_slots, refs.buffers)))
    refs.check(plan)
    writer = None if refs.new is None else Writer(plan, refs, refs.new)
    missing = None if refs.missing is None else MissingPages(plan, refs, refs.missing)
    kernel = TransposedKernel if plan.transposed else Kernel
    kernel(plan, refs, Stream(plan, refs, writer), missing, refs.outputs(plan)).run()
