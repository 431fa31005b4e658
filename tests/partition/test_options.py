"""Array options of an operation's own are cut by a mesh as its class declares, or refused."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationImpl, OperationMetadata, OperationOutput, UnsupportedError
from attnops.sharding import create_mesh

B, T, H, D = 4, 6, 4, 2


class Decayed(OperationImpl):
    """Linear attention with decays, and arrays by batch, by kv head and by feature."""

    option_axes: ClassVar = {"decay": "h", "start": "bh", "gain": "k", "table": ""}

    @classmethod
    def get_impl_name(cls):
        return "decayed"

    def forward_native(self, query, key, value, *, decay=None, start=None, gain=None, table=None, undeclared=None):
        group = query.shape[2] // key.shape[2]
        distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None]
        weights = jnp.where(distance >= 0, decay[:, None, None] ** jnp.maximum(distance, 0), 0.0)
        if gain is not None:
            key = key * gain["by kv head"][None, None, :, None]
        if table is not None:
            value = value * table
        k, v = (jnp.repeat(x, group, axis=2) for x in (key, value))
        scores = jnp.einsum("bthd,bshd->bhts", query, k, precision="highest") * weights
        if start is not None:
            scores = scores + start[:, :, None, None]
        return OperationOutput(jnp.einsum("bhts,bshd->bthd", scores, v, precision="highest"))


def exact(q, k, v, decay, start, gain, table):
    """In float64 loops, from nothing but the definition."""
    q, k, v, decay, start, gain, table = (np.asarray(x, np.float64) for x in (q, k, v, decay, start, gain, table))
    out = np.zeros((B, T, H, D))
    for h in range(H):
        kv = h * k.shape[2] // H
        for t in range(T):
            for s in range(T):
                weight = decay[h] ** (t - s) if s <= t else 0.0
                score = (q[:, t, h] * k[:, s, kv] * gain[kv]).sum(-1) * weight + start[:, h % start.shape[1]]
                out[:, t, h] += score[:, None] * v[:, s, kv] * table
    return out


@pytest.fixture(scope="module")
def mesh():
    return create_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])


def draw(K):
    rng = np.random.default_rng(K)
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, D), (H,), (B, H), (K,), (D,)
    return [rng.uniform(0.2, 0.9, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray], ids=["traced", "known"])
def test_each_device_has_its_own_part(mesh, K, kind):
    q, k, v, decay, start, gain, table = draw(K)
    operation = Decayed(OperationMetadata(mesh=mesh))
    options = {"decay": decay, "start": start, "gain": {"by kv head": gain}, "table": table}
    found = operation(q, k, v, **jax.tree.map(kind, options)).attention_outputs
    np.testing.assert_allclose(found, exact(q, k, v, decay, start, gain, table), rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_options_are_those_without_a_mesh(mesh):
    q, k, v, decay, start, gain, table = map(jnp.asarray, draw(2))

    def loss(operation, decay, gain):
        out = operation(q, k, v, decay=decay, start=start[:, :1], gain={"by kv head": gain}, table=table)
        return (out.attention_outputs * jnp.arange(T)[:, None, None]).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    cut, plain = (gradients(Decayed(OperationMetadata(mesh=m)), decay, gain) for m in (mesh, None))
    for a, b in zip(cut, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_an_array_without_declared_axes_is_refused_with_what_to_declare(mesh):
    q, k, v, decay, *_ = draw(4)
    for array in (jnp.ones(H), np.ones(H)):
        with pytest.raises(UnsupportedError, match=r"undeclared=float\d+ \[4\]: its axes are not declared") as caught:
            Decayed(OperationMetadata(mesh=mesh))(q, k, v, decay=jnp.asarray(decay), undeclared=array)
        assert "declare option_axes = {'undeclared': 'h'} in the class" in str(caught.value)
    out = Decayed(OperationMetadata())(q, k, v, decay=jnp.asarray(decay), undeclared=jnp.ones(H))
    assert out.attention_outputs.shape == (B, T, H, D)
    # A number is the same on every device.
    Decayed(OperationMetadata(mesh=mesh))(q, k, v, decay=jnp.asarray(decay), undeclared=3)


@pytest.mark.slow
def test_an_array_of_another_shape_than_is_declared_is_impossible(mesh):
    q, k, v, *_ = draw(4)
    with pytest.raises(ValueError, match=r"decay has shape \(3,\), but option_axes declares 'h'"):
        Decayed(OperationMetadata(mesh=mesh))(q, k, v, decay=jnp.ones(3))
