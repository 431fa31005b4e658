"""What kernels of any language share, for whoever writes one: nothing here knows a platform.

`elementwise` takes masks and biases apart, `scoring` says what is done to scores, `coverage` fits block maps to a
kernel's tiles, `parts` is about some of a softmax's keys, `vmap` folds mapped axes into the batch, and `varying`,
`rules` and `nograd` serve `jax.shard_map` and derivatives.
"""
