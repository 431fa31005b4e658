# /// script
# dependencies = ["ringattention==0.1.2", "jax"]
# ///
# shows: ringattention: bias [B, H, T, S]; bias [1, H, T, S]; bias and causal; float32 bias of bfloat16; bias of −inf
# shows: ringattention: bias of finfo.min
# The package does not document `attn_bias`, and slices its queries. Expected: the same output for chunks of 2 and of 4
# tokens; got: all chunks of queries add the bias of the first (`_chunk_attention_bias` starts at query 0).
import jax
import jax.extend

jax.lib.xla_bridge = jax.extend.backend  # which the package asks for the platform; JAX 0.8 has removed it
from ringattention import ringattention  # noqa: E402

mesh = jax.sharding.Mesh(jax.devices()[:1], "ring")
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 8))
bias = jax.random.normal(jax.random.key(1), (1, 1, 4, 4))
names = ("dropout_rng", "precision", "policy")


def attend(chunk):
    options = dict.fromkeys(names) | {"causal_block_size": None, "deterministic": True, "attn_pdrop": 0.0}
    options |= {"query_chunk_size": chunk, "key_chunk_size": chunk, "dtype": q.dtype, "prevent_cse": True}
    call = lambda q, k, v: ringattention(q, k, v, bias, None, None, "ring", True, options)  # noqa: E731
    return jax.shard_map(call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(q, k, v)


got, expected = attend(2), attend(4)
print("got", got)
print("expected", expected)
