"""A grid step of the kernel over caches: an item, whose scores are transposed if it has many rows of them."""

from __future__ import annotations

from attnops_tpu.caches.kernel import Kernel
from attnops_tpu.caches.missing import MissingPages
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, as_slots
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.caches.transposed import TransposedKernel
from attnops_tpu.caches.write import Writer
from attnops_tpu.caches.write_prompts import write_prompts


def run_item(plan: CachePlan, refs: CacheRefs) -> None:
    """A grid step, which computes an item."""
    refs = refs._replace(block=refs.block[0], buffers=tuple(map(as_slots, refs.buffers)))
    refs.check(plan)
    write_prompts(plan, refs)
    writer = None if refs.new is None else Writer(plan, refs, refs.new)
    missing = None if refs.missing is None else MissingPages(plan, refs, refs.missing)
    kernel = TransposedKernel if plan.transposed else Kernel
    kernel(plan, refs, Stream(plan, refs, writer), missing).run()
