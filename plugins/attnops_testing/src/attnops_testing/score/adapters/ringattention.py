"""`ringattention` (Liu et al.) on one device: `ringattention_jax` in a `shard_map`, as its documentation calls it."""
# /// script
# dependencies = ["ringattention==0.1.2", "jax==0.12.0.1"]
# ///

import jax
from jax.extend import backend
from jax.sharding import PartitionSpec

try:
    import ringattention
except AttributeError:  # it needs a function that newer JAX does not have: jax.lib.xla_bridge
    jax.lib.xla_bridge = backend
    import ringattention

FRAMEWORK, PACKAGE = "jax", "ringattention"
LINK = "https://github.com/haoliuhl/ringattention"
CONVENTIONS = {}
REFUSES = {
    "GQA": "no argument for it: as many key heads as query heads",
    "MQA": "no argument for it: as many key heads as query heads",
    "rows that see no key, GQA": "no argument for it: as many key heads as query heads",
}


def attend(q, k, v, *, causal=False, bias=None, segments=None, dropout=0.0):
    T, S = q.shape[1], k.shape[1]
    options = {
        "causal_block_size": 1 if causal else None, "deterministic": not dropout, "dropout_rng": jax.random.key(0),
        "attn_pdrop": dropout, "query_chunk_size": T, "key_chunk_size": S, "dtype": q.dtype,
        "policy": jax.checkpoint_policies.nothing_saveable, "precision": None, "prevent_cse": True,
    }  # fmt: skip
    mesh = jax.make_mesh((1,), ("sp",), devices=jax.devices()[:1])
    spec = PartitionSpec(None, "sp")

    def part(q, k, v, bias, segments):
        return ringattention.ringattention_jax(q, k, v, bias, segments, None, "sp", True, options)

    rest = (None if bias is None else PartitionSpec(), None if segments is None else PartitionSpec())
    inside = jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3 + rest, out_specs=spec, check_vma=False)
    return inside(q, k, v, bias, segments)
