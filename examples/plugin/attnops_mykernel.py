import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from attnops import Limits, OperationOutput, Reason
from attnops.kernels import equally_varying, once_differentiable, output_like, repair_empty_rows, zero_unseen
from attnops.operations.vanilla import VanillaAttention

BLOCK = 128


class MyAttention(VanillaAttention):  # what it can't serve runs the core's native forward
    api_version = 2
    priority = 10  # of several that serve a platform, the highest wins
    limits: ClassVar = {"tpu": Limits(dtypes={"float32", "bfloat16"}, same_dtype=True, linear_memory=False)}

    def forward_tpu(self, query, key, value, *, mask=None, softmax_scale=None):
        band = (None, None) if mask is None else mask.split().band.limits
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        arrays = equally_varying(zero_unseen(query, key, value, mask))  # hidden tokens may hold NaN
        run = once_differentiable(attend, "MyAttention has no second derivative")
        out = run(*arrays, band, scale, self.metadata.interpret)
        return repair_empty_rows(OperationOutput(out), mask, key.shape[1])

    def unsupported(self, request):  # reasons that limits can't express
        for name, length in (("T", request.query_length), ("S", request.key_length)):
            if length % BLOCK:
                yield Reason(name, length, f"must be a multiple of {BLOCK}", "use attnops.kernels.pad_to_multiple")
        if not request.mask_structure.is_band:
            yield Reason("mask", request.mask, "must be causal or a window, the same for every batch and head")


def tile(q, k, v, first, band, scale):
    """Attention of queries [N, D], which begin at ``first``, over keys [S, D] and values [S, Dv]; float32."""
    scores = jnp.dot(q, k.T, precision="highest") * scale
    i, j = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    if band[0] is not None:
        scores = jnp.where(first + i - j >= band[0], scores, -1e30)
    if band[1] is not None:
        scores = jnp.where(first + i - j <= band[1], scores, -1e30)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=1, keepdims=True)))
    return jnp.dot(weights, v, precision="highest") / weights.sum(axis=1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def attend(query, key, value, band, scale, interpret):
    from jax.experimental import pallas as pl  # the toolchain, only when it runs

    def kernel(q_ref, k_ref, v_ref, out_ref):
        q, k, v = (ref[...].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
        out_ref[...] = tile(q, k, v, pl.program_id(2) * BLOCK, band, scale).astype(out_ref.dtype)

    (B, T, H, D), (S, K, Dv) = query.shape, value.shape[1:]
    out = pl.pallas_call(
        kernel,
        grid=(B, H, T // BLOCK),
        in_specs=[
            pl.BlockSpec((None, None, BLOCK, D), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, S, D), lambda b, h, i: (b, h * K // H, 0, 0)),
            pl.BlockSpec((None, None, S, Dv), lambda b, h, i: (b, h * K // H, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, BLOCK, Dv), lambda b, h, i: (b, h, i, 0)),
        out_shape=output_like(query, (B, H, T, Dv), query.dtype),
        interpret=interpret,  # metadata.interpret: whether to run in Pallas's interpreter, without a TPU
    )(*(x.swapaxes(1, 2) for x in (query, key, value)))
    return out.swapaxes(1, 2)


def plain(query, key, value, band, scale):
    """`attend` in plain JAX, for the backward pass."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    one = functools.partial(tile, first=0, band=band, scale=scale)
    out = jax.vmap(jax.vmap(one, 1, 1))(*(x.astype(jnp.float32) for x in (query, key, value)))
    return out.astype(query.dtype)


def backward(band, scale, interpret, arrays, d_out):
    return jax.vjp(lambda *x: plain(*x, band, scale), *arrays)[1](d_out)


attend.defvjp(lambda *x: (attend(*x), x[:3]), backward)
