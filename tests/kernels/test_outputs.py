"""`output_like`: outputs of kernels vary over the mesh axes that an input varies over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attnops.kernels import equally_varying, output_like

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def axes_of(x):
    aval = jax.typeof(x)
    return aval.mat.varying


def call(x, outputs):
    """A call through jax.ffi, which is traced and not compiled."""
    return jax.ffi.ffi_call("no_such_target", outputs, vmap_method="sequential")(x)


@pytest.mark.parametrize("axes", [("batch",), ("batch", "model")])
def test_outputs_of_an_ffi_call_vary_as_the_input(axes):
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("batch", "model"))

    def kernel(x):
        one, two = call(x, (output_like(x, (3, 5), x.dtype), output_like(x, x.shape, jnp.int32)))
        assert axes_of(one) == axes_of(two) == set(axes)
        return one.sum() + two.sum() + x

    found = jax.eval_shape(jax.shard_map(kernel, mesh=mesh, in_specs=P(axes), out_specs=P(axes)), X)
    assert found.shape == (8, 4)
    assert output_like(X, (2,), jnp.int32).sharding is None


def test_outputs_without_it_are_made_to_vary_after_the_call():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("batch",))

    def kernel(x):
        (out,) = equally_varying((x, call(x, jax.ShapeDtypeStruct(x.shape, x.dtype))))[1:]
        assert axes_of(out) == {"batch"}
        return out

    found = jax.eval_shape(jax.shard_map(kernel, mesh=mesh, in_specs=P("batch"), out_specs=P("batch")), X)
    assert found.shape == (8, 4)
