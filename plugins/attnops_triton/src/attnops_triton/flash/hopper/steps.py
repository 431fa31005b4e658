"""Steps of Hopper's computing partitions: products, and stores of sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from attnops_triton.flash.hopper.shared import place_output, store_rows


@gluon.jit
def new_product(a, b, options: gl.constexpr):
    """A tile of products, which runs asynchronously."""
    # The initial sums give the product its type.
    zeros = gl.full(options.shape, 0.0, gl.float32, options.scores_layout)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def no_sums(options: gl.constexpr):
    """Sums of zero, [rows, D]."""
    return gl.full([options.rows, options.plan.D], 0.0, gl.float32, options.sums_layout)


@gluon.jit
def operand(weights, options: gl.constexpr):
    """Weights as the left operand of a product with a head dim."""
    return gl.convert_layout(weights.to(options.dtype), options.weights_layout)


@gluon.jit
def wait_held(shared, group: gl.constexpr):
    """Wait for the partition's part of the rows that the program holds."""
    mbarrier.wait(shared.ready.index(group), 0)
    # Otherwise Triton writes one before each `keep_order`.
    gl.barrier()


@gluon.jit
def keep_order(shared, group: gl.constexpr):
    """End a basic block, so that the assembler does not move a later wait for products before earlier exponentials.

    The barrier that is waited for is complete, since `wait_held`.
    """
    mbarrier.wait(shared.ready.index(group), 0)


@gluon.jit
def fill(buffer, sums, options: gl.constexpr):
    """Write sums to a buffer that a tensor map will copy."""
    buffer.store(sums.to(options.dtype))
    fence_async_shared()


@gluon.jit
def store_sums(array, i: gl.constexpr, sums, done, group: gl.constexpr, n, program, shared, options: gl.constexpr):
    """Store a partition's sums for an output: through the buffer of the held array ``i``, which is not read any more,
    or by pointers.

    If another partition copies the buffer, ``done`` are barriers that tell it.
    """
    rows: gl.constexpr = options.rows
    D: gl.constexpr = options.plan.D
    length, head, stride = place_output(n, program, options)
    if options.stores_by_map:
        fill(shared.held[i].tile.index(group), sums, options)
        if options.fuses_dq:
            # The computing partitions have too few registers for stores.
            mbarrier.arrive(done.index(group))
        else:
            store_rows(array, i, group, head, program, shared, options)
    else:
        token = shared.first + group * rows + gl.arange(0, rows, layout=options.sums_row_layout)
        at = array + program.b.to(gl.int64) * length * stride + head.to(gl.int64) * D
        at = at + (token.to(gl.int64) * stride)[:, None]
        at = at + gl.arange(0, D, layout=gl.SliceLayout(0, options.sums_layout))[None, :]
        gl.store(at, sums.to(options.output_dtype), mask=(token < length)[:, None])
