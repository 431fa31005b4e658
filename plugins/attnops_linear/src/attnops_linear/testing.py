"""The conformance suite of linear attention: problems for `attnops_testing.reference.check_against`.

::

    for outcome in check("attnops-linear:linear_attention"):
        print(outcome)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationRegistry
from attnops.masks import KeyPadding, Segments
from attnops_linear.reference import reference
from attnops_linear.request import LinearRequest
from attnops_testing.reference import ReferenceSubject, check_against
from attnops_testing.support_table import contract_table

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


# The first tokens of documents: at edges of chunks, inside of them, and several in one.
_FIRST: Final = (0, 3, 5, 16, 20, 32, 45, 64, 70)
# By argument that is not finite, the documents of row 0, with NaN, and of row 1, with infinities.
_SPOILED: Final = {
    "query": (1, 7), "key": (2, 6), "value": (3, 7), "decay": (4, 8), "beta": (5, 2), "initial_state": (0, 0),
}  # fmt: skip


def spoiled(name: str, decay: str = "head") -> Problem:
    """A problem whose option ``spoiled``, see `subject`, makes one document of each row not finite, in some heads.

    Args:
        name: the argument; each of these documents has one such token of it.
        decay: that of `problem`.
    """
    draw = problem(decay=decay, mask=lambda B, T: Segments(np.searchsorted(_FIRST, np.arange(T), side="right")))

    def drawn(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, options = draw(rng)
        arrays = dict(zip(("query", "key", "value"), arguments, strict=True)) | options
        (B, T, K), H = arguments[0].shape[:3], arguments[2].shape[2]
        place, document, must = np.zeros(arrays[name].shape, bool), np.zeros((B, T), bool), np.zeros((B, T, H), bool)
        for b, i in enumerate(_SPOILED[name]):
            first, stop = (*_FIRST, T)[i : i + 2]
            token, document[b, first:stop] = (first + stop) // 2, True
            if name == "initial_state":
                place[b, : H // K, 0], token = True, first
            else:  # the first key head's
                place[b, token, : place.shape[2] // K, ...] = True
            must[b, token : token + 1 if name == "query" else stop, : H // K] = True
        return arguments, options | {"spoiled": {name: place}, "document": document, "must": must}

    return drawn


def subject(operation: str | type[Any], **options: Any) -> ReferenceSubject:
    """The subject of the suite: an operation, its class or its name, next to `reference`.

    A problem may say where an argument is infinite or NaN, in row 0 NaN (``spoiled``); which tokens are of such a
    document (``document``); and which outputs the definition then makes so (``must``). Outputs of these documents, and
    their states, count as 0, unless they are finite where they must not be.
    """

    class Apart(operation if isinstance(operation, type) else OperationRegistry.get(operation)):  # type: ignore[misc]
        def __call__(self, *arguments: Any, spoiled: Any = None, **options: Any) -> Any:
            document, must = options.pop("document", None), options.pop("must", None)
            if spoiled is None:
                return super().__call__(*arguments, **options)
            arrays = dict(zip(("query", "key", "value"), arguments, strict=True)) | options
            for name, place in spoiled.items():
                bad = jnp.asarray([jnp.nan, jnp.inf], arrays[name].dtype).reshape(2, *[1] * (place.ndim - 1))
                arrays[name] = jnp.where(place, bad, arrays[name])
            outputs, state = super().__call__(**arrays)
            hidden = document[:, :, None, None] & ~(must[..., None] & jnp.isfinite(outputs))
            return _shown(outputs, state, hidden, document)

    return ReferenceSubject(operation=Apart, reference=oracle, **options)


def _shown(outputs: Any, state: Any, hidden: Any, document: Any) -> tuple[Any, Any]:
    return jnp.where(hidden, 0, outputs), jnp.where(document[:, -1, None, None, None], 0, state)


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
    "decays of -20 and -150 by channel": problem(decay="channel", decays=(-20.0, -150.0)),
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
    **{f"a document that is not finite by {name}": spoiled(name) for name in _SPOILED},
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
    made = subject(operation)
    return check_against(
        made.operation, made.reference, {name: with_state(PROBLEMS[name]) for name in problems}, **options
    )


@jax.jit
def oracle(query: jax.Array, key: jax.Array, value: jax.Array, return_state: bool, **options: Any) -> Any:
    """`reference` with the arguments of `with_state`'s problems."""
    places, document, must = (options.pop(name, None) for name in ("spoiled", "document", "must"))
    arrays = {"query": query, "key": key, "value": value} | options
    for name, place in (places or {}).items():
        arrays[name] = jnp.where(place, 0, arrays[name])
    outputs, state = reference(**arrays)
    return (outputs, state) if must is None else _shown(outputs, state, document[:, :, None, None], document)


def with_state(draw: Problem) -> Problem:
    """The problem with the state asked for."""

    def asked(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, options = draw(rng)
        return arguments, options | {"return_state": True}

    return asked


_PLAIN: Final[dict[str, Any]] = {
    "batch": 2, "length": 1024, "key_heads": 4, "value_heads": 8, "head_dim": 128, "value_head_dim": 128,
    "dtypes": ("bfloat16",), "decay": "head", "beta": True, "options": frozenset({"decay", "beta"}),
}  # fmt: skip
_MASKED: Final = frozenset({"decay", "beta", "mask"})
_ROWS: Final[dict[str, dict[str, Any]]] = {
    "gated delta rule: decays by head, beta": {},
    "KDA: decays by channel, beta": {"decay": "channel"},
    "DeltaNet: beta alone": {"decay": "none", "options": frozenset({"beta"})},
    "Mamba-2: decays by head": {"beta": False, "options": frozenset({"decay"})},
    "GLA, HGRN2: decays by channel": {"decay": "channel", "beta": False, "options": frozenset({"decay"})},
    "RetNet, lightning: constant decays": {"decay": "constant", "beta": False, "options": frozenset({"decay"})},
    "float32": {"dtypes": ("float32",)},
    "float16": {"dtypes": ("float16",)},
    "as many key heads as value heads": {"key_heads": 8},
    "D 64, Dv 128": {"head_dim": 64},
    "D 256": {"head_dim": 256, "value_head_dim": 256},
    "odd lengths": {"length": 1023},
    "documents (`Segments`)": {"mask_kinds": frozenset({"Segments"}), "options": _MASKED},
    "padding (`KeyPadding`)": {"mask_kinds": frozenset({"KeyPadding"}), "options": _MASKED},
    "first and last states": {
        "initial_state": True, "return_state": True,
        "options": frozenset({"decay", "beta", "initial_state", "return_state"}),
    },
    "a step of one token": {
        "length": 1, "mode": "decode", "initial_state": True, "return_state": True,
        "options": frozenset({"decay", "beta", "initial_state", "return_state"}),
    },
}  # fmt: skip


def markdown_table() -> str:
    """What serves which feature of linear attention on which platform, in GitHub's Markdown."""
    return contract_table(["linear_attention"], {name: LinearRequest(**(_PLAIN | row)) for name, row in _ROWS.items()})
