# /// script
# dependencies = ["ringattention==0.1.2", "jax"]
# ///
# shows: ringattention: causal, T = 1
# The package documents no bounds of chunks. Expected: the same output for chunks of 1 and of 4 tokens; got: NaN for
# query 0, since chunks of one query skip the key at their own position (`below_or_on_diag`).
import jax
import jax.extend

jax.lib.xla_bridge = jax.extend.backend  # which the package asks for the platform; JAX 0.8 has removed it
from ringattention import ringattention  # noqa: E402

mesh = jax.sharding.Mesh(jax.devices()[:1], "ring")
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 8))
bias = None
names = ("dropout_rng", "precision", "policy")


def attend(chunk):
    options = dict.fromkeys(names) | {"causal_block_size": 1, "deterministic": True, "attn_pdrop": 0.0}
    options |= {"query_chunk_size": chunk, "key_chunk_size": chunk, "dtype": q.dtype, "prevent_cse": True}
    call = lambda q, k, v: ringattention(q, k, v, bias, None, None, "ring", True, options)  # noqa: E731
    return jax.shard_map(call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(q, k, v)


got, expected = attend(1), attend(4)
print("got", got)
print("expected", expected)
