"""A call under a mesh: one `jax.shard_map` over batch and heads, masks and biases cut to match."""
