"""Eager calls: numbers, and what functions close over, are data; other ones compile nothing anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationOutput, OperationRegistry
from attnops.biases import ALiBi, ScoreFn
from attnops.masks import Causal, MaskFn, PrefixLM, Segments, SlidingWindow
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.oracle import attention
from attnops_testing.tolerance import assert_close, tolerance

CALLS = 200
T, S, H, D = 24, 40, 2, 8
I, J = np.ogrid[:T, :S]


def mask_over(i: int, table: Any) -> MaskFn:
    return MaskFn(lambda b, h, q, kv: (kv % (i + 2) != 0) | (table[q] == i))


def bias_over(i: int, table: Any) -> ScoreFn:
    return ScoreFn(lambda s, b, h, q, kv: s * (i / 100) + table[kv])


# By what differs: the options of call i, and what they should mean to the oracle.
KINDS: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "softmax scale": lambda i: ({"softmax_scale": 0.01 * (i + 1)},) * 2,
    "soft cap": lambda i: ({"logits_soft_cap": 0.5 + i / 10},) * 2,
    "window": lambda i: ({"mask": SlidingWindow(i, 0)}, {"mask": (I + 16 - i <= J) & (J <= I + 16)}),
    "offset": lambda i: ({"mask": Causal(offset=i)}, {"mask": I + i >= J}),
    "prefix": lambda i: ({"mask": PrefixLM(i)}, {"mask": (i > J) | (J <= I + 16)}),
    "offset of a bias": lambda i: (
        {"bias": ALiBi(np.array([0.5, 0.125], np.float32), offset=i)},
        {"bias": -np.array([0.5, 0.125])[:, None, None] * np.abs(J - I - i)},
    ),
    "function of a mask": lambda i: (
        {"mask": mask_over(i, jnp.arange(T) % (i + 1))},
        {"mask": (J % (i + 2) != 0) | (I % (i + 1) == i)},
    ),
    "function of a bias": lambda i: ({"bias": bias_over(i, jnp.arange(S) * (i / 1000))}, {}),
}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What is compiled while the test runs; programs that are found on disk count too."""
    found: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def operands(dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((1, n, H, D)), dtype) for n in (T, S, S))


def check(out: jax.Array, **options: Any) -> None:
    q, k, v = operands(out.dtype)
    options = {name: x[None, None] if name == "mask" else x for name, x in options.items()}
    exact, plain = (attention(q, k, v, dtype=dtype, **options) for dtype in (np.float64, np.dtype(out.dtype)))
    assert_close("output", out, exact.out, tolerance(exact.out, plain.out, exact.out_magnitude, out.dtype, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
@pytest.mark.tier(every=4)
def test_flash_compiles_once_for_all_numbers_of_a_kind(kind: str, compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata(block_q=16, block_k=16))
    calls = [KINDS[kind](i) for i in range(CALLS)]
    jax.block_until_ready(operation(*operands(), **calls[3][0]))
    compiled.clear()
    outs = [operation(*operands(), **options).attention_outputs for options, _ in calls]
    assert compiled == []
    for i in (0, 1, 2, 15, 39, 60, CALLS - 1):
        if calls[i][1]:
            check(outs[i], **calls[i][1])


@pytest.mark.slow
def test_what_scores_become_by_functions_with_other_numbers(compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    q, k, _ = operands()
    scores = np.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    for i in (0, 7, 50):
        out = operation(*operands(), bias=bias_over(i, jnp.arange(S) * (i / 1000))).attention_outputs
        check(out, bias=scores * (i / 100) - scores + J * (i / 1000))


@pytest.mark.slow
def test_gradients_share_programs_too(compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    q, k, v = operands()

    def gradient(i: int) -> jax.Array:
        options = {"softmax_scale": 0.1 * (i + 1), "logits_soft_cap": 2.0 + i, "mask": SlidingWindow(i, 0)}
        return jax.vjp(lambda q: operation(q, k, v, **options).attention_outputs, q)[1](q)[0]

    gradient(3).block_until_ready()
    compiled.clear()
    found = [gradient(i) for i in range(5)]
    assert compiled == []
    # Under jit numbers are part of the program.
    for i in (0, 4):
        np.testing.assert_allclose(found[i], jax.jit(lambda i=i: gradient(i))(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 0.17])
def test_bfloat16_is_the_same_to_the_bit_eager_and_compiled(scale: float) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    run = lambda *x: operation(*x, softmax_scale=scale).attention_outputs  # noqa: E731
    x = operands(jnp.bfloat16)
    np.testing.assert_array_equal(run(*x), jax.jit(run)(*x))
    if scale > 0:
        check(run(*x), softmax_scale=scale)


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
@pytest.mark.parametrize("kind", ["softmax scale", "soft cap", "window", "offset", "function of a mask"])
@pytest.mark.tier(quick=["soft cap-sdpa", "offset-vanilla"], every=2)
def test_operations_that_are_not_compiled_compile_no_number(name: str, kind: str, compiled: list[str]) -> None:
    if (name, kind) == ("sdpa", "soft cap"):
        return
    operation = OperationRegistry.create(f"attnops:{name}", OperationMetadata(mode="prefill"))
    jax.block_until_ready(operation(*operands(), **KINDS[kind](3)[0]))
    compiled.clear()
    for i in range(4, 20):
        operation(*operands(), **KINDS[kind](i)[0])
    assert compiled == []


# Under a mesh.


def of_two(name: str = "flash", **fields: Any) -> Any:
    """An operation on a mesh of two devices, which cut the heads."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    return OperationRegistry.create(f"attnops:{name}", OperationMetadata(mesh=mesh, **fields))


def looking_up(table: jax.Array) -> MaskFn:
    return MaskFn(lambda b, h, q, kv: kv != table[q])


MESH_CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda i: {},
    "window": lambda i: {"mask": Causal() & SlidingWindow(7, 0)},
    "array mask": lambda i: {"mask": jnp.asarray(I + i >= J)[None, None]},
    "segments": lambda i: {"mask": Segments(jnp.arange(T)[None] // (i + 5), jnp.arange(S)[None] // (i + 5))},
    "function of a mask": lambda i: {"mask": looking_up(jnp.arange(T) % (i + 2))},
    "array bias": lambda i: {"bias": jnp.full((1, H, T, S), i / 7), "softmax_scale": 0.5},
    "sinks": lambda i: {"sinks": jnp.arange(H) / (i + 1), "logits_soft_cap": 3.0},
}


@pytest.mark.parametrize(
    ("name", "kind"), [*(("vanilla", kind) for kind in MESH_CALLS), ("flash", "function of a mask"), ("sdpa", "window")]
)
@pytest.mark.tier(slow=["vanilla-segments", "vanilla-sinks", "vanilla-array bias", "vanilla-plain"])
def test_under_a_mesh_a_call_with_other_arrays_compiles_nothing(name: str, kind: str, compiled: list[str]) -> None:
    operation = of_two(name)
    q, k, v = operands()
    jax.block_until_ready(operation(q, k, v, **MESH_CALLS[kind](0)))
    calls = [((q * i, k, v), MESH_CALLS[kind](i)) for i in (1, 2)]
    expected = [OperationRegistry.create("attnops:vanilla")(*args, **options) for args, options in calls]
    compiled.clear()
    found = [operation(*args, **options) for args, options in calls]
    assert compiled == []
    for out, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(out.attention_outputs, reference.attention_outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_under_a_mesh_gradients_of_other_arrays_compile_nothing(compiled: list[str]) -> None:
    operation, (q, k, v) = of_two("vanilla"), operands()

    def gradient(q: jax.Array) -> jax.Array:
        return jax.grad(lambda q: (operation(q, k, v, mask=Causal()).attention_outputs ** 2).sum())(q)

    jax.block_until_ready(gradient(q))
    other = jax.block_until_ready(2 * q)
    compiled.clear()
    found = jax.block_until_ready(gradient(other))
    assert compiled == []
    alone = OperationRegistry.create("attnops:vanilla")
    expected = jax.grad(lambda q: (alone(q, k, v, mask=Causal()).attention_outputs ** 2).sum())(2 * q)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        [{"softmax_scale": x} for x in (0.3, -0.3, 1.0)],
        [{"mask": Causal(offset=x)} for x in (16, 30)],
        [{"mask": Causal()}, {"mask": ~Causal() | Causal()}, {}],
        [{"bias": jnp.ones((1, 1, T, S)) * J}, {"bias": jnp.ones((1, H, T, S)) * J}],
    ],
)
def test_under_a_mesh_other_numbers_and_structures_are_other_programs(options: list[dict[str, Any]]) -> None:
    operation, alone, x = of_two("vanilla"), OperationRegistry.create("attnops:vanilla"), operands()
    for given in options:
        found, expected = (run(*x, **given).attention_outputs for run in (operation, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_mesh_that_is_set_runs_on_its_own_devices_after_another_of_its_shape() -> None:
    operation, x = OperationRegistry.create("attnops:vanilla"), [np.asarray(x) for x in operands()]
    expected = operation(*x).attention_outputs
    for devices in (jax.devices()[:2], jax.devices()[2:4], jax.devices()[:2][::-1]):
        with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("tp",))):
            found = operation(*x).attention_outputs
        assert list(found.sharding.mesh.devices.flat) == devices
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_under_a_mesh_no_cache_keeps_what_a_call_was_given() -> None:
    """Functions, those that have no program too, and arrays."""
    operation, (q, k, v) = of_two(), operands()
    limit = [0]

    def opaque(b: Any, h: Any, i: Any, j: Any) -> Any:
        return jnp.asarray(j) > np.asarray(limit[0]) + 0 * jnp.cumsum(jnp.asarray(j) * jnp.ones((), jnp.int32))

    arrays = [jnp.asarray(x) * 1 for x in (q, k, v)]
    bias = jnp.zeros((1, H, T, S))
    operation(*arrays, mask=MaskFn(opaque), bias=bias)
    operation(*arrays, bias=bias)
    kept = [weakref.ref(x) for x in (opaque, *arrays, bias)]
    del opaque, arrays, bias
    gc.collect()
    assert [x() for x in kept] == [None] * 5


class Shifting(VanillaAttention):
    """Adds what it was made with to the values; the mesh's programs must not mix up two of these."""

    environment = 0.0

    def __init__(self, metadata: OperationMetadata | None = None, shift: float | None = None) -> None:
        super().__init__(metadata)
        if shift is not None:
            self.shift = shift

    def environment_key(self) -> float:
        return self.environment

    def forward_native(self, query: Any, key: Any, value: Any) -> OperationOutput:  # type: ignore[override]
        return OperationOutput(query * 0 + getattr(self, "shift", 0) + self.environment)


def test_under_a_mesh_operations_with_state_of_their_own_share_no_program() -> None:
    metadata, x = of_two().metadata, operands()
    for shift in (1.0, 2.0):
        assert (Shifting(metadata, shift)(*x).attention_outputs == shift).all()


def test_under_a_mesh_programs_follow_the_environment_key(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, x = Shifting(of_two().metadata), operands()
    for environment in (3.0, 4.0, 3.0):
        monkeypatch.setattr(Shifting, "environment", environment)
        assert (operation(*x).attention_outputs == environment).all()


@pytest.mark.slow
def test_under_a_mesh_programs_follow_the_registry() -> None:
    """A forward that looks up another operation by name runs what the name stands for now."""

    class Delegating(VanillaAttention):
        def forward_native(self, query: Any, key: Any, value: Any) -> OperationOutput:  # type: ignore[override]
            return OperationOutput(query * 0 + len(OperationRegistry._registered))

    operation, x = Delegating(of_two().metadata), operands()
    before = OperationRegistry._registered[:]
    try:
        assert (operation(*x).attention_outputs == len(before)).all()
        OperationRegistry.register(type("Other", (VanillaAttention,), {
            "get_impl_name": classmethod(lambda cls: "other"), "__module__": "acme.other",
        }))  # fmt: skip
        assert (operation(*x).attention_outputs == len(before) + 1).all()
    finally:
        OperationRegistry._registered[:] = before
        OperationRegistry.refresh()
