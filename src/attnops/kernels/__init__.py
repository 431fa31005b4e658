"""What kernels of any language share, for whoever writes one: nothing here knows a platform.

`elementwise` takes masks and biases apart, `scoring` says what is done to scores, `coverage` fits block maps to a
kernel's tiles, `vmap` folds mapped axes into the batch, `varying` and `nograd` serve `jax.shard_map` and derivatives.
"""
