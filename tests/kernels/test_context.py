"""`TraceContext`: a value by thread, which JAX's caches are keyed by."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp

from attnops.kernels import TraceContext

ONE = TraceContext("tests:one", 1)
TWO = TraceContext("tests:two", "x")


def test_the_innermost_value_of_this_thread_holds() -> None:
    seen = []
    with ONE(2):
        with TWO("y"), ONE(3):
            assert (ONE.value, TWO.value) == (3, "y")
            thread = threading.Thread(target=lambda: seen.append((ONE.value, TWO.value)))
            thread.start()
            thread.join()
        assert (ONE.value, TWO.value) == (2, "x")
    assert (ONE.value, TWO.value) == (1, "x")
    assert seen == [(1, "x")]


def test_a_program_is_traced_once_for_each_value() -> None:
    traced = []

    def function(x: jax.Array) -> jax.Array:
        traced.append((ONE.value, TWO.value))
        return x

    program = jax.jit(function)
    for value in (1, 2, 1, 2):
        with ONE(value):
            program.trace(jnp.ones(1))
    TraceContext("tests:three", 0)  # a further one changes no key
    with ONE(2):
        program.trace(jnp.ones(1))
    program.trace(jnp.ones(1))
    assert traced == [(1, "x"), (2, "x")]
