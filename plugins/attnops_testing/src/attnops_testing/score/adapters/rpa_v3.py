"""`ragged_paged_attention` v3 of tpu-inference, a kernel for TPUs, in Pallas's interpreter, without vLLM."""
# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2"]
# ///

import importlib.util
import sys
import types

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from worker import Refused

folders = importlib.util.find_spec("tpu_inference").submodule_search_locations
sys.modules["tpu_inference"] = types.ModuleType("tpu_inference")  # the package itself imports vLLM
sys.modules["tpu_inference"].__path__ = folders

from tpu_inference.kernels.ragged_paged_attention.v3 import kernel  # noqa: E402

ALONE = ["tpu-inference==0.32.0"]
FRAMEWORK, PACKAGE = "jax", "tpu-inference"
LINK = "https://github.com/vllm-project/tpu-inference/tree/main/tpu_inference/kernels/ragged_paged_attention/v3"
GRADIENTS = False
CONVENTIONS = {}
NOT_RUN = {
    "object has no attribute 'indices'": "Pallas's interpreter fails: it has no references that are cast or reshaped",
}
REFUSES = {
    "window to both sides": "`sliding_window` is to the left",
    "segments": "a document is a sequence, with a length; tokens have no ids",
    "lengths": "a sequence has no queries of padding",
    "second derivatives": "it is forward alone",
    "vmap": "a batch is its sequences",
}


def attend(q, k, v, *, causal=False, window=None, scale=None, soft_cap=None):
    pltpu.reset_tpu_interpret_mode_state()
    (B, T, H, D), (S, K), page = q.shape, k.shape[1:3], 16
    if not 0 < T <= S:
        raise Refused("`dynamic_validate_inputs` of the kernel: 0 < q_len <= kv_len")
    # A sequence's last T tokens are new, and the others are in its pages.
    per_row = -(-S // page)
    pages = jnp.zeros(kernel.get_kv_cache_shape(B * per_row, page, K, D, k.dtype), k.dtype)
    if S > T:
        stored = kernel.merge_kv(*(x.reshape(B * S, K, -1) for x in (k, v)))
        rows = pages.reshape(B, per_row * page, *pages.shape[2:])
        pages = rows.at[:, : S - T].set(stored.reshape(B, S, *stored.shape[1:])[:, : S - T]).reshape(pages.shape)
    new = (x[:, S - T :].reshape(-1, *x.shape[2:]) for x in (k, v))
    counts = jnp.arange(B + 1, dtype=jnp.int32)
    ranges = jnp.array([B, B, B] if T == 1 else [0, 0, B], jnp.int32)
    with pltpu.force_tpu_interpret_mode():
        out, _ = kernel.ragged_paged_attention(
            q.reshape(B * T, H, D), *new, pages, jnp.full(B, S, jnp.int32), jnp.arange(B * per_row, dtype=jnp.int32),
            T * counts, ranges, use_causal_mask=causal, sliding_window=window and window[0] + 1, soft_cap=soft_cap,
            sm_scale=D**-0.5 if scale is None else scale, vmem_limit_bytes=1 << 26,
            d_block_sizes=(1, 32, 1, 32), p_block_sizes=(8, 32, 8, 32), m_block_sizes=(8, 32, 8, 32),
        )  # fmt: skip
    return out.reshape(B, T, H, D)
