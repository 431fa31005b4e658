"""`ringattention` of Liu, on two devices with two chunks each where lengths divide; newer JAX can't import it."""
# /// script
# dependencies = ["ringattention==0.1.2", "jax==0.7.2"]
# ///

import math

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)

from ringattention import ringattention  # noqa: E402  # it looks for devices

FRAMEWORK, PACKAGE = "jax", "ringattention"
LINK = "https://github.com/haoliuhl/ringattention"
CONVENTIONS = {}
dropout_rng = jax.random.key(0)  # it may not be traced


def attend(q, k, v, *, causal=False, bias=None, segments=None, dropout=0.0):
    devices = math.gcd(2, q.shape[1], k.shape[1])
    chunks = [max(1, x.shape[1] // devices // math.gcd(2, x.shape[1] // devices)) for x in (q, k)]
    options = {
        "causal_block_size": 1 if causal else None, "deterministic": not dropout, "dropout_rng": dropout_rng,
        "attn_pdrop": dropout, "query_chunk_size": chunks[0], "key_chunk_size": chunks[1], "dtype": q.dtype,
        "policy": jax.checkpoint_policies.nothing_saveable, "precision": None, "prevent_cse": True,
    }  # fmt: skip

    def part(q, k, v, bias, segments):
        return ringattention(q, k, v, bias, segments, None, "ring", True, options)

    rows = P(None, "ring")
    by_query = P(None, None, "ring") if bias is not None and bias.shape[2] > 1 else P()
    return jax.shard_map(
        part, mesh=Mesh(np.array(jax.devices()[:devices]), "ring"), in_specs=(rows, rows, rows, by_query, P()),
        out_specs=rows, check_vma=False,
    )(q, k, v, bias, segments)  # fmt: skip
