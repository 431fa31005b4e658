"""Compiled programs: exported ones, and steps that update donated states in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops_caches import Rows
from attnops_linear import CausalConv1d, LinearAttention, StateCache
from attnops_linear.testing import documents, problem

# What XLA copies is what its optimiser decides; without it, programs of symbolic shapes take all memory.
pytestmark = [pytest.mark.optimised, pytest.mark.slow]

B, K, H, D, Dv = 3, 2, 4, 8, 16
LINEAR, CONV = LinearAttention(), CausalConv1d()


def arrays(T: int, B: int = B, **options: Any) -> dict[str, jax.Array]:
    draw = problem(T, B=B, K=K, H=H, **({"D": D, "Dv": Dv, "state": False} | options))
    (query, key, value), found = draw(np.random.default_rng(0))
    given = {"query": query, "key": key, "value": value, **found}
    return {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}


def again(call: Any, *given: Any) -> Any:
    """The call, exported and serialised, with batches of any size."""
    (b,) = export.symbolic_shape("b")

    def symbolic(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)

    program = export.export(jax.jit(call))(*jax.tree.map(symbolic, given))
    return export.deserialize(program.serialize()).call


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


@pytest.mark.parametrize("T", [3, 40])
def test_a_call_and_its_gradients_are_exported_for_any_batch(T: int) -> None:
    def call(arrays: dict[str, jax.Array]) -> Any:
        def loss(arrays: dict[str, jax.Array]) -> Any:
            found = LINEAR(**arrays, mask=documents(1, T), return_state=True)
            return (found.attention_outputs**2).sum() + (found.state**2).sum(), found

        return jax.grad(loss, has_aux=True)(arrays)

    program = again(call, arrays(T, state=True, decay="channel"))
    for batch in (B, 1):
        given = arrays(T, batch, state=True, decay="channel")
        assert_close(program(given), jax.jit(call)(given))


def test_steps_are_exported_for_any_batch() -> None:
    weight = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)

    def call(cache: StateCache, arrays: dict[str, jax.Array], x: jax.Array, lengths: jax.Array) -> Any:
        mixed, cache = CONV.step(x, weight, cache, query_lengths=lengths)
        output, cache = LINEAR.step(**arrays, cache=cache, query_lengths=lengths)
        return mixed, output, cache

    program = None
    for batch in (B, 2):
        cache = StateCache.create(batch=batch, heads=H, head_dim=D, value_head_dim=Dv, conv=(5, 4))
        given = cache, arrays(2, batch), jnp.ones((batch, 2, 5)), jnp.arange(batch) % 3
        program = again(call, *given) if program is None else program
        found = program(*given)
        assert isinstance(found[2], StateCache)
        assert_close(found, jax.jit(call)(*given))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("layers", [None, 6])
def test_steps_update_donated_states_in_place(T: int, layers: int | None) -> None:
    B, D = 8, 64
    given = arrays(T, B, D=D, Dv=D)
    cache = StateCache.create(batch=B, heads=H, head_dim=D, conv=(5, 4), layers=layers)
    weight, x = jnp.ones((5, 4)), jnp.ones((B, T, 5))

    def one(cache: StateCache) -> Any:
        mixed, cache = CONV.step(x, weight, cache)
        output, cache = LINEAR.step(**given, cache=cache)
        return (mixed.outputs.sum(), output.attention_outputs.sum()), cache

    def steps(cache: StateCache, count: int) -> Any:
        def step(cache: StateCache, _: Any) -> Any:
            if layers is None:
                return one(cache)[::-1]

            def at(layer: Any, carry: Any) -> Any:
                output, new = one(carry[0].layer(layer))
                return carry[0].with_layer(layer, new), output

            return jax.lax.fori_loop(0, layers, at, (cache, (0.0, 0.0)))

        return jax.lax.scan(step, cache, length=count)

    program = jax.jit(steps, static_argnums=1, donate_argnums=0).lower(cache, 3)
    # One layer is updated in place; of several, one is copied out and back.
    check_memory(program, cache, cache.state.nbytes // 4 if layers is None else cache.state.nbytes // layers * 5 // 2)


def test_packed_steps_update_donated_states() -> None:
    B, D, N = 8, 64, 20
    given = arrays(N, 1, D=D, Dv=D)
    cache = StateCache.create(batch=B, heads=H, head_dim=D)

    def step(cache: StateCache, rows: Rows) -> Any:
        output, cache = LINEAR.step(**given, cache=cache, rows=rows)
        return output.attention_outputs.sum(), cache

    rows = Rows(jnp.array([0, 3, 20]), jnp.array([2, 5]))
    check_memory(jax.jit(step, donate_argnums=0).lower(cache, rows), cache, cache.state.nbytes)


def check_memory(lowered: Any, cache: StateCache, most: int) -> None:
    """All arrays of the cache are updated in place, and temporaries have fewer bytes than ``most``."""
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < most, memory
