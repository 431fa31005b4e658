"""What the adapters to other frameworks share; the adapters are `attnops.flax`, `attnops.jax_nn` and their like."""
