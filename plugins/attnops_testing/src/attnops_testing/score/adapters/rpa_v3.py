"""Ragged paged attention v3 of tpu-inference, by Pallas's interpreter of TPUs."""
# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.12.0.1", "libtpu==0.0.52", "--no-deps tpu-inference==0.32.0"]
# ///

import functools
import importlib
import importlib.util
import logging
import sys
import types

import jax.numpy as jnp
from jax._src import tpu_info
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from worker import Refused

FRAMEWORK, PACKAGE = "jax", "tpu-inference"
LINK = "https://github.com/vllm-project/tpu-inference"
SIZE = {"length": 128, "head_dim": 128, "dtype": "bfloat16"}
GRADIENTS = False
CONVENTIONS = {}

package, logger = (types.ModuleType(f"tpu_inference{each}") for each in ("", ".logger"))
package.__path__ = list(importlib.util.find_spec("tpu_inference").submodule_search_locations)
logger.init_logger = logging.getLogger  # the package's own initialisation needs vLLM
sys.modules |= {module.__name__: module for module in (package, logger)}
tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V6E, 1)
rpa = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
rpa.get_tpu_version = lambda: 6
pl.pallas_call = functools.partial(pl.pallas_call, interpret=pltpu.InterpretParams())


def attend(q, k, v, *, causal=False, window=None, soft_cap=None, sinks=None, scale=None):
    if not causal:
        raise Refused("no argument for it: queries always see no key after them")
    B, T, _H, D = q.shape
    K = k.shape[2]
    if k.shape[1] != T or window is not None:
        raise Refused("it is not probed")
    pages = jnp.zeros(rpa.get_kv_cache_shape(B, T, K, D, k.dtype), k.dtype)
    flat = (x.reshape(B * T, *x.shape[2:]) for x in (q, k, v))
    lengths, starts = jnp.full((B,), T, jnp.int32), jnp.arange(B + 1, dtype=jnp.int32) * T
    more = {} if sinks is None else {"attention_sink": sinks}
    out, _ = rpa.ragged_paged_attention(
        *flat, pages, lengths, jnp.arange(B, dtype=jnp.int32), starts, jnp.array([0, 0, B], jnp.int32),
        sm_scale=D**-0.5 if scale is None else scale, soft_cap=soft_cap, **more,
    )  # fmt: skip
    return out.reshape(q.shape)
