"""The contenders of `gpu_linear.py`; one that is not installed, or does not serve a case, raises `Refused`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops_testing.bench.case import Refused

Arrays = dict[str, Any]
NARROW: Final = ("query", "key", "value", "d_out")  # of the case's dtype; other inputs are float32
# By rule, FLA's name; and its names of the inputs.
FLA: Final = {"gdn": "gated_delta_rule", "ssd": "simple_gla", "kda": "kda"}
SHORT: Final = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta", "state": "initial_state"}


class LinearCase(NamedTuple):
    """A call of rows of some tokens, with K key heads and H value heads of D features.

    A single token updates a given state. ``gradients`` says whether the gradients of all inputs are computed.
    """

    rule: str
    rows: int
    tokens: int
    gradients: bool
    K: int
    H: int
    D: int
    dtype: str


class Program(NamedTuple):
    """A program for a case.

    Attributes:
        run: starts it and returns its arrays: ``out`` and ``state``, or ``out`` and the gradient of each input.
        wait: waits for what `run` returned.
        numbers: an array of its library as a numpy array of float64.
        device: the name of the device.
        versions: of its libraries.
    """

    run: Callable[[], Arrays]
    wait: Callable[[Arrays], object]
    numbers: Callable[[Any], np.ndarray]
    device: str
    versions: str


def drawn(case: LinearCase) -> Arrays:
    """The inputs, float32 numpy arrays of numbers that the case's dtype has where they are `NARROW`."""
    rng, (rule, B, T, gradients, K, H, D, dtype) = np.random.default_rng(0), case
    given = {name: rng.standard_normal((B, T, K, D), np.float32) for name in ("query", "key")}
    given = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in given.items()}
    given["value"] = rng.standard_normal((B, T, H, D), np.float32)
    given["decay"] = rng.standard_exponential((B, T, H, D) if rule == "kda" else (B, T, H), np.float32) / -10
    if rule != "ssd":
        given["beta"] = rng.random((B, T, H), np.float32)
    if T == 1:
        given["state"] = rng.standard_normal((B, H, D, D), np.float32)
    if gradients:
        given["d_out"] = rng.standard_normal((B, T, H, D), np.float32)
    return {name: x.astype(jnp.dtype(dtype)).astype(np.float32) if name in NARROW else x for name, x in given.items()}


def attnops_function(interpret: bool, precision: Any) -> Callable[..., Arrays]:
    """A function of a state, other inputs by name, and the gradient of the output; a state or gradient may be None."""
    metadata = OperationMetadata(platform="cuda", on_unsupported="error", interpret=interpret, precision=precision)
    operation: Any = OperationRegistry.create("attnops-triton:linear_attention", metadata)

    def program(state: jax.Array | None, x: dict[str, jax.Array], d_out: jax.Array | None) -> Arrays:
        if d_out is not None:
            out, pull_back = jax.vjp(lambda x: operation(**x).attention_outputs, x)
            return {"out": out} | pull_back(d_out)[0]
        found = operation(**x, initial_state=state, return_state=True)
        return {"out": found.attention_outputs, "state": found.state}

    return program


def _attnops(case: LinearCase, given: Arrays, interpret: bool, precision: Any = None) -> Program:
    """attnops-triton; refused where the native forward would run. The states are donated."""
    compiled = jax.jit(attnops_function(interpret, precision), donate_argnums=0)
    inputs = {name: jnp.asarray(x, case.dtype if name in NARROW else x.dtype) for name, x in given.items()}
    state, d_out = inputs.pop("state", None), inputs.pop("d_out", None)

    def run() -> Arrays:
        nonlocal state
        try:
            found: Arrays = compiled(state, inputs, d_out)
        except UnsupportedError as error:
            raise Refused("; ".join(map(str, error.reasons))) from None
        state = None if state is None else found["state"]
        return found

    versions = f"jax {jax.__version__}, triton {version('triton')}"
    device = jax.devices()[0].device_kind
    return Program(run, jax.block_until_ready, lambda x: np.asarray(x, np.float64), device, versions)


def _fla(case: LinearCase, given: Arrays, interpret: bool) -> Program:
    """flash-linear-attention's function of prompts, or of single tokens."""
    name = FLA[case.rule]
    try:
        torch = importlib.import_module("torch")
        if interpret or not torch.cuda.is_available():
            raise Refused("torch sees no GPU")
        module = importlib.import_module(f"fla.ops.{name}")
    except ImportError as error:
        raise Refused(f"it can't be imported ({error}): pip install torch fla-core") from None
    function = getattr(module, f"{'fused_recurrent' if case.tokens == 1 else 'chunk'}_{name}")
    dtypes = {name: getattr(torch, case.dtype) if name in NARROW else torch.float32 for name in given}
    inputs = {name: torch.from_numpy(x).cuda().to(dtypes[name]) for name, x in given.items()}
    d_out = inputs.pop("d_out", None)

    def run() -> Arrays:
        options = {SHORT[name]: x for name, x in inputs.items()}
        if d_out is None:
            with torch.inference_mode():
                out, state = function(**options, output_final_state=True)
            return {"out": out, "state": state}
        out, _ = function(**options)
        return {"out": out} | dict(zip(inputs, torch.autograd.grad(out, tuple(inputs.values()), d_out), strict=True))

    for x in inputs.values() if case.gradients else ():
        x.requires_grad_()
    versions = f"fla-core {version('fla-core')}, torch {torch.__version__}, triton {version('triton')}"
    return Program(
        run, lambda _: torch.cuda.synchronize(), lambda x: x.detach().double().cpu().numpy(),
        torch.cuda.get_device_name(), versions,
    )  # fmt: skip


# By name; functions of the case, its inputs, and of whether Triton is interpreted.
CONTENDERS: Final[dict[str, Callable[[LinearCase, Arrays, bool], Program]]] = {
    "attnops-triton": _attnops,
    "attnops-triton-default": lambda case, given, dry: _attnops(case, given, dry, "default"),
    "FLA": _fla,
}
