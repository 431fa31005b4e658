"""The attention kernels that `tpu_kernels.py` compares: the number of times that a problem runs each region of their
code, and the bytes moved outside of them. Each kernel is compiled in a separate process.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import tpu_flywheel

from attnops_tpu.aot import devices
from attnops_tpu.collectives import KERNEL, scheduled
from attnops_tpu.generations import target
from attnops_tpu.memory import outside_bytes
from attnops_tpu.schedule import Regions

HEADS: Final = 8
SPLASH: Final = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
TOKAMAX: Final = "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention"
# Options of tokamax: the compiler's other scheduler (forward), parts of a causal mask's diagonal left out (forward),
# and dq reduced in three parts (backward). After the scheduler may be the layouts of queries, keys and values: h if the
# head dim is in the lanes, s if tokens are.
SCHEDULER: Final = "experimental scheduler"
DIAGONAL: Final = "diag_skip, diag_grid=4"
REDUCTION: Final = "dq_reduction_steps=3"
# Sequences per call; 1 for other masks.
BATCH: Final = {"packed": 32}
# For each region of a kernel: its name, how often it runs, and the iterations of its loops.
Trips = list[tuple[str, float, float]]


class KernelJob(NamedTuple):
    """One compilation.

    Attributes:
        generation: the TPU generation.
        name: the contender's name.
        backward: which pass.
        mask: causal, full, window, wide window, documents, packed or blocks.
        T: tokens.
        head_dim: the head dim of queries, keys and values.
        blocks: block sizes, (queries, keys, keys at a time), of flywheel (queries, keys, queries at a time, keys at a
            time); empty for the library's own choice.
        option: an option of tokamax; empty for none.
    """

    generation: str
    name: str
    backward: bool
    mask: str
    T: int
    head_dim: int
    blocks: tuple[int, ...] = ()
    option: str = ""


def attnops_mask(kind: str, T: int) -> Any:
    from attnops.masks import Blocks, Causal, Segments, SlidingWindow

    masks = {
        "causal": Causal(),
        "window": Causal() & SlidingWindow(1023, 0),
        "wide window": Causal() & SlidingWindow(4095, 0),
        "documents": Causal() & Segments(np.arange(T) // 1024),
        "packed": Causal() & Segments(_packed(T)),
        "blocks": Blocks(_chosen(T), 512, 512),
    }
    return masks[kind].bind(BATCH.get(kind, 1), HEADS, T, T) if kind in masks else None


def _chosen(T: int) -> Any:
    """One block of 512 keys of eight for each block of queries, at random, as indices."""
    n, rng = -(-T // 512), np.random.default_rng(0)
    return np.stack([rng.permutation(n)[: n // 8] for _ in range(n)])[None, None]


def _packed(T: int) -> Any:
    """The document of each token, [32, T]. The mean length of documents rises from 256 in the first sequence to T."""
    random = np.random.default_rng(0)
    means = np.geomspace(256, T, BATCH["packed"])
    return np.stack([np.cumsum(random.random(T) < 1 / mean) for mean in means]).astype(np.int32)


def attnops(job: KernelJob) -> Callable[..., Any]:
    from attnops import OperationMetadata, OperationRegistry

    flash = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    return lambda *qkv: flash(*qkv, mask=attnops_mask(job.mask, job.T)).attention_outputs


def _peer_mask(masks: Any, job: KernelJob) -> Any:
    T = job.T
    if job.mask == "documents":
        ids = np.arange(T) // 1024
        return masks.NumpyMask((ids[:, None] == ids) & np.tri(T, dtype=bool))
    if "window" in job.mask:
        return masks.LocalMask((T, T), (1023 if job.mask == "window" else 4095, 0), 0)
    return {"full": masks.FullMask, "causal": masks.CausalMask}[job.mask]((T, T))


def _by_head(function: Callable[..., Any], head_dim: int) -> Callable[..., Any]:
    """A function of [1, T, H, D] arrays that calls a function of [H, T, D] arrays with a scaled query."""

    def called(q: Any, k: Any, v: Any) -> Any:
        out = function(*(x[0].swapaxes(0, 1) for x in (q * head_dim**-0.5, k, v)))
        return out.swapaxes(0, 1)[None]

    return called


def splash(job: KernelJob) -> Callable[..., Any]:
    kernels, masks = (importlib.import_module(f"{SPLASH}_{part}") for part in ("kernel", "mask"))
    q, k, compute = job.blocks
    sizes = kernels.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=compute, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([_peer_mask(masks, job)] * HEADS)
    return _by_head(
        kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes), job.head_dim
    )  # fmt: skip


def tokamax(job: KernelJob) -> Callable[..., Any]:
    kernels, masks = (importlib.import_module(f"{TOKAMAX}_{part}") for part in ("kernel", "mask"))
    q, k, compute = job.blocks
    layouts = re.search(r" ([hs]{3})$", job.option)
    minor = {"h": kernels.QKVLayout.HEAD_DIM_MINOR, "s": kernels.QKVLayout.SEQ_MINOR}
    of_q, of_k, of_v = (minor[letter] for letter in (layouts[1] if layouts else "hhh"))
    config = kernels.SplashConfig(
        block_q=q, block_kv=k, block_kv_compute=compute, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=compute,
        q_layout=of_q, k_layout=of_k, v_layout=of_v,
        use_experimental_scheduler=job.option.startswith(SCHEDULER),
        dq_reduction_steps=3 if job.option == REDUCTION else None,
        qk_diag_skip=job.option == DIAGONAL, sv_diag_skip=job.option == DIAGONAL, qk_diag_grid=4,
    )  # fmt: skip
    return _by_head(kernels.make_splash_mha_single_device(_peer_mask(masks, job), config=config), job.head_dim)


def flywheel(job: KernelJob) -> Callable[..., Any]:
    tpu_flywheel.pretend(job.generation)
    return tpu_flywheel.function(job.blocks, job.mask, HEADS, job.T, job.head_dim, job.backward)


CONTENDERS: Final[dict[str, Callable[[KernelJob], Callable[..., Any]]]] = {
    "attnops-tpu": attnops,
    "splash": splash,
    "tokamax": tokamax,
    "flywheel": flywheel,
}
# A part of the name of a contender's kernel, forward and backward.
KERNELS: Final = {
    "attnops-tpu": ("attnops_flash_forward", "attnops_flash_backward"),
    "flywheel": ("flash_attn_mha", "flash_attn_bwd"),
}


class TileCounts(NamedTuple):
    """Numbers of tiles per head.

    Attributes:
        active: tiles in which some query sees some key.
        full: tiles in which all queries see all keys.
        rows: rows of tiles.
        widest: the most active tiles in a row.
    """

    active: int
    full: int
    rows: int
    widest: int


def counts(mask: str, T: int, block_q: int, block_k: int, by_key: bool) -> TileCounts:
    from attnops.masks import Coverage, block_map

    coverage = np.asarray(block_map(attnops_mask(mask, T), (1, 1, T, T), block_q, block_k).coverage)[0, 0]
    coverage = coverage.T if by_key else coverage
    active = coverage > 0
    return TileCounts(
        int(active.sum()), int((coverage == Coverage.FULL).sum()), len(coverage), int(active.sum(axis=1).max())
    )


def pairs(mask: str, T: int) -> float:
    """The scores of a head that the mask shows."""
    if mask == "full":
        return float(T * T)
    seen = {"documents": tpu_flywheel.DOCUMENT, "window": 1024, "wide window": 4096}.get(mask, T)
    triangle = seen * (seen + 1) / 2
    return T / seen * triangle if mask == "documents" else triangle + (T - seen) * seen


def own_trips(job: KernelJob) -> list[tuple[float, float, Trips]]:
    """For each call of attnops-tpu's kernel and an average head: the grid steps, how many of them are padding, since
    the tile lists of other heads are longer, and the trips.
    """
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata
    from attnops.kernels import FlashCall
    from attnops.masks import Coverage
    from attnops_tpu.flash.backend import PallasFlash
    from attnops_tpu.flash.prepare import tile_schedules
    from attnops_tpu.flash.tile_schedule import REDUCED, Variant, kinds_of, unpack

    B = BATCH.get(job.mask, 1)
    x = jax.ShapeDtypeStruct((B, job.T, HEADS, job.head_dim), jnp.bfloat16)
    mask = attnops_mask(job.mask, job.T)
    with target(job.generation):
        plan = PallasFlash().plan(FlashCall(OperationMetadata(platform="tpu"), x, x, x, mask=mask))  # type: ignore[arg-type]
        schedules = tile_schedules(plan, mask)
    calls = []
    for schedule in schedules.spans if job.backward else schedules.forward:
        maps = np.asarray(schedule.entries).reshape(-1, schedule.stride)[:, : schedule.longest + 1]
        entries, n = unpack(maps), len(maps) * schedule.joined
        steps = entries.kind[:, :-1]
        # The map before; the first map's tiles follow nothing, which the average head's do not.
        start = np.roll(steps[:, -1], 1) if plan.sequential else steps[:, 0]
        before = np.concatenate([start[:, None], steps[:, :-1]], axis=1)
        trips: Trips = []
        variants = [Variant(kind) for kind in kinds_of(schedules.spans)] if job.backward else schedule.variants
        drained = (steps == Coverage.EMPTY) & (entries.first[:, :-1] == 1)
        begins = 1 / (B * HEADS) if plan.sequential else 1.0
        names = {int(kind): kind.name for kind in Coverage} | {REDUCED: "REDUCED"}
        for kind, of_kind in itertools.groupby(variants, key=lambda variant: variant.kind):
            left = drained if kind == Coverage.EMPTY else steps == kind
            end = np.full(len(steps), kind == Coverage.EMPTY)
            for _, follows in (each := list(of_kind)):
                name = "drain" if kind == Coverage.EMPTY else names[kind]
                rest = (kind, follows) == each[-1]
                taken, ends = (x & (rest | np.isin(y, follows)) for x, y in ((left, before), (end, steps[:, -1])))
                left, end = left & ~taken, end & ~ends
                count = float(taken.sum()) / n + begins * float(ends.mean())
                after = f" after {' or '.join(names[x] for x in follows)}" if len(each) > 1 else ""
                trips.append((name + after, count, 0.0))
        rows, rounds = float(entries.last.sum()) / n, job.head_dim / 8
        empty = float(((entries.kind == 0) & entries.last).sum()) / n
        longest = schedule.longest / schedule.joined
        padding = float(longest - ((steps > 0) | (entries.first[:, :-1] > 0)).sum() / n)
        if job.backward:
            trips = [("clear dq", 1.0, rounds), ("clear dk, dv", empty, rounds), *trips, ("write", rows, 0.0),
                     ("write dq", 1.0, rounds / 2)]  # fmt: skip
            calls.append((longest, padding, trips))
        else:
            trips += [("empty rows", float(drained.sum()) / n, 0.0), ("init", begins, 0.0), ("finish", rows, 0.0)]
            calls.append((longest + 1 / schedule.joined, padding, trips))
    return calls


def peer_trips(job: KernelJob, regions: Regions) -> tuple[float, float, Trips]:
    """For JAX's or tokamax's splash attention: the grid steps of a head, how many are padding (0), and the trips."""
    q, k, _ = job.blocks
    n = counts(job.mask, job.T, q, k, job.backward)
    # tokamax may list the active tiles. Else the grid has all columns of tiles (tokamax), or as many as the widest row.
    has_list = job.name == "tokamax" and (not job.backward or job.option == REDUCTION)
    width = -(-job.T // (q if job.backward else k)) if job.name == "tokamax" else n.widest
    bodies = sum(region.uses["MATMUL"] > 0 for region in regions.skipped)
    tiles: dict[int, Trips] = {
        0: [],
        1: [("tiles", float(n.active), 0.0)],
        2: [("FULL", float(n.full), 0.0), ("PARTIAL", float(n.active - n.full), 0.0)],
    }
    if bodies not in tiles:
        raise LookupError(
            f"{job.name} has {bodies} bodies (regions with products), but 0 to 2 are known: its kernel changed"
        )
    steps = n.active if has_list else n.rows * width
    # With one tile per row each step clears and writes; with at most two tokamax writes in each step.
    others = len(regions.skipped) - bodies
    begins = [("init", float(n.rows), 0.0)] if others or n.widest > 1 else []
    ends = [] if others < 2 else [("end", float(n.rows), 0.0)]
    return steps, 0.0, [*begins, *tiles[bodies], *ends]


def _with_copies(regions: Regions, steps: float, rows: float, trips: Trips) -> Trips:
    """The trips including the regions that copy blocks: inputs in every step, then outputs once per row."""
    others, last = iter(trips), max(i for i, region in enumerate(regions.skipped) if region.uses["MATMUL"])
    result: Trips = [
        ("copies", steps if i < last else rows, 0.0) if region.is_copy else next(others, ("unknown", 0.0, 0.0))
        for i, region in enumerate(regions.skipped)
    ]
    return [*result, *others]


def bundles_per_head(job: KernelJob, regions: Regions) -> dict[str, float]:
    """The bundles per head, by part of the kernel."""
    calls = own_trips(job) if job.name == "attnops-tpu" else [peer_trips(job, regions)]
    total: dict[str, float] = {}
    for steps, padding, trips in calls:
        if sum(not region.is_copy for region in regions.skipped) == len(trips) - 1:
            # This region is so short that each step counts it: "write" at a head dim of 64, "empty rows" of blocks.
            trips = [trip for trip in trips if trip[0] not in ("write", "empty rows")]
        rows = max((runs for name, runs, _ in trips if name in ("init", "write", "finish")), default=0.0)
        trips = _with_copies(regions, steps, rows, trips)
        parts = regions.total(steps - padding, trips) | {"padding": padding * regions.step}
        # Once per call, for all heads.
        parts["once"] /= HEADS * BATCH.get(job.mask, 1)
        for part, bundles in parts.items():
            total[part] = total.get(part, 0.0) + bundles
    return total


def traced(job: KernelJob, sharding: Any = None) -> Any:
    """The traced program of a job, a `jax.stages.Traced`."""
    import jax
    import jax.numpy as jnp

    # Without a mask tokamax's kernel needs a device. Its causal kernel has the same code for tiles.
    compiled_job = job._replace(mask="causal") if (job.name, job.mask) == ("tokamax", "full") else job
    function = CONTENDERS[job.name](compiled_job)
    shape = BATCH.get(job.mask, 1), job.T, HEADS, job.head_dim
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def gradients(*args: Any) -> Any:
        return jax.vjp(function, *args[:-1])[1](args[-1])

    with target(job.generation):
        return jax.jit(gradients).trace(x, x, x, x) if job.backward else jax.jit(function).trace(x, x, x)


def child(job: KernelJob) -> None:
    """In a separate process: compile, and print the kernel's name and the bytes that are moved outside of kernels."""
    import jax

    place = jax.sharding.SingleDeviceSharding(devices(job.generation)[0])
    with target(job.generation):
        lowered = traced(job, place).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, job.generation)
    names = re.findall(r"%([\w.\-]+) = [^\n]*" + re.escape(KERNEL), program)
    part = KERNELS.get(job.name, ("fwd", "dkv"))[job.backward]
    matching = [name for name in names if part in name]
    if not matching:
        raise LookupError(f"{job.name} has no kernel named like {part}, but {names}: its kernels were renamed")
    print(
        json.dumps({
            "kernel": matching[0], "outside": outside_bytes(program),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        })
    )  # fmt: skip
