"""The conformance suite of linear attention: problems for `attnops_testing.reference.check_against`.

::

    for outcome in check("attnops-linear:linear_attention"):
        print(outcome)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import numpy as np

from attnops.masks import KeyPadding, Segments
from attnops_linear.reference import reference
from attnops_testing.reference import check_against

Problem = Callable[[np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


def problem(
    T: int = 75,
    *,
    decay: str = "head",
    beta: bool = True,
    B: int = 2,
    K: int = 2,
    H: int = 4,
    D: int = 16,
    Dv: int = 24,
    betas: tuple[float, ...] = (),
    decays: tuple[float, ...] = (),
    state: bool = True,
    mask: Callable[[int, int], Any] | None = None,
    scale: float | None = None,
) -> Problem:
    """A function that draws the arguments of a call.

    Args:
        T: tokens.
        decay: "none", "constant" [Hv], "head" [B, T, Hv] or "channel" [B, T, Hv, D].
        beta: whether the call has betas, from 0 to 2.
        B: rows.
        K: key heads.
        H: value heads.
        D: head dim of keys.
        Dv: head dim of values.
        betas: values that betas take, in addition to random ones.
        decays: values that decays take, in addition to random ones.
        state: whether the call has an initial state.
        mask: a function of B and T that makes the mask.
        scale: the scale.
    """

    def drawn(rng: np.random.Generator, shape: tuple[int, ...], low: float, values: tuple[float, ...]) -> Any:
        found = -rng.exponential(0.1, size=shape) if low < 0 else rng.uniform(0, 2, size=shape)
        some = rng.random(shape) < 0.4
        return np.where(some, rng.choice(values, size=shape), found) if values else found

    def draw(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = rng.normal(size=(B, T, K, D))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        options: dict[str, Any] = {}
        shapes = {"constant": (H,), "head": (B, T, H), "channel": (B, T, H, D)}
        if decay != "none":
            options["decay"] = drawn(rng, shapes[decay], -1, decays)
        if beta:
            options["beta"] = drawn(rng, (B, T, H), 0, betas)
        if state:
            options["initial_state"] = rng.normal(size=(B, H, D, Dv))
        if mask is not None:
            options["mask"] = mask(B, T)
        if scale is not None:
            options["scale"] = scale
        return (rng.normal(size=(B, T, K, D)), key, rng.normal(size=(B, T, H, Dv))), options

    return draw


def documents(B: int, T: int) -> Segments:
    """Segments that begin anywhere, at other tokens in each row."""
    rng = np.random.default_rng(5)
    return Segments(np.sort(rng.integers(0, 6, size=(B, T)), axis=1))


def padding(B: int, T: int) -> KeyPadding:
    """A fifth of the tokens, anywhere."""
    return KeyPadding(np.random.default_rng(6).random((B, T)) < 0.8)


_STRONG: Final = (0.0, -1e4, -150.0, -np.inf)
PROBLEMS: Final[dict[str, Problem]] = {
    **{
        f"decay by {decay}, {'delta rule' if beta else 'sums'}": problem(decay=decay, beta=beta)
        for decay in ("none", "constant", "head", "channel")
        for beta in (False, True)
    },
    **{f"T = {T}": problem(T, decay="channel" if T % 2 else "head") for T in (1, 2, 5, 16, 63, 64, 65, 128, 130)},
    "decays of zero, -1e4, -150 and -inf": problem(decays=_STRONG),
    "decays of zero, -1e4, -150 and -inf by channel": problem(decay="channel", decays=_STRONG),
    "betas of 0, 1 and 2": problem(betas=(0.0, 1.0, 2.0)),
    "documents": problem(mask=documents),
    "documents by channel": problem(decay="channel", mask=documents),
    "documents without decay": problem(decay="none", beta=False, mask=documents),
    "padding": problem(mask=padding),
    "documents and padding": problem(decay="channel", mask=lambda B, T: documents(B, T) & padding(B, T)),
    "one key head": problem(K=1),
    "as many key heads as value heads": problem(K=4),
    "without a state": problem(state=False),
    "scale": problem(scale=-0.7),
    "head dims of 12 and 1": problem(D=12, Dv=1),
    "head dims of 1": problem(D=1, Dv=1, beta=False),
}


def check(
    operation: Any = "attnops-linear:linear_attention", problems: Iterable[str] = tuple(PROBLEMS), **options: Any
) -> list[Any]:
    """Check an operation that computes the contract of `attnops_linear.LinearAttention`.

    Args:
        operation: its name, or its class.
        problems: names of `PROBLEMS`.
        **options: ``platform``, ``interpret``, ``metadata``, ``dtypes`` and ``gradients`` of
            `attnops_testing.reference.check_against`.

    Returns:
        An outcome for each problem, dtype and check.
    """
    return check_against(operation, oracle, {name: with_state(PROBLEMS[name]) for name in problems}, **options)


@jax.jit
def oracle(query: jax.Array, key: jax.Array, value: jax.Array, return_state: bool, **options: Any) -> Any:
    """`reference` with the arguments of `with_state`'s problems."""
    return reference(query, key, value, **options)


def with_state(draw: Problem) -> Problem:
    """The problem with the state asked for."""

    def asked(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, options = draw(rng)
        return arguments, options | {"return_state": True}

    return asked
