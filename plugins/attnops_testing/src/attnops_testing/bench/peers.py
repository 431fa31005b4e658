"""Peers: other libraries' attention, an adapter for each, and their table."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from attnops.masks import And, Causal, Full, Mask, Segments, SlidingWindow
from attnops_testing.bench import cache_peers
from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.case import Case, Refused
from attnops_testing.bench.program import Contender, Ready, compile_jax, run_torch


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library's attention.

    Attributes:
        name: the name on the command line and in the table.
        package: the package that pip installs and Python imports.
        adapt: makes the program for a case.
        function: the full name of the function that is called.
        adapt_cache: makes the program for a call over a cache, from the case and the function's name and version; None
            if the peer is not measured over caches.
    """

    name: str
    package: str
    adapt: Callable[[Case], Ready]
    function: str = ""
    adapt_cache: Callable[[CacheCase, str], Ready] | None = None

    @property
    def installed(self) -> bool:
        """Whether the package is installed; it is not imported."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def contender(self) -> Contender:
        """The peer as a contender, which is refused if it is not installed."""
        return Contender(self.name, self._prepare, is_peer=True)

    def _prepare(self, case: Case | CacheCase) -> Ready:
        if not self.installed:
            raise Refused(f"{self.package} is not installed: pip install {self.package}")
        if isinstance(case, Case):
            return self.adapt(case)
        if self.adapt_cache is None:
            raise Refused("it is not measured over caches")
        return self.adapt_cache(case, self.describe())

    def describe(self) -> str:
        """What runs, with its version."""
        return f"{self.function} {importlib.metadata.version(self.package)}"


def missing_peers() -> list[Peer]:
    """The peers that are not installed."""
    return [peer for peer in PEERS.values() if not peer.installed]


@dataclasses.dataclass(frozen=True)
class _Terms:
    """A mask as a conjunction of the masks for which peers have arguments.

    Attributes:
        causal: no query sees a key after it. With T = S top-left and bottom-right alignment are the same.
        window: the number of keys before and after each query's position, without the key at that position.
        segments: segment ids.
        rest: the mask for which peers have no argument, to be passed as an array.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    segments: Segments | None = None
    rest: Mask | None = None


def _terms(case: Case) -> _Terms:
    terms = _Terms()
    parts = [] if case.mask is None else [case.mask]
    while parts:
        part = parts.pop()
        match part:
            case And(left, right):
                parts += [right, left]
            case Full():
                pass
            case Causal(offset=None | 0):
                terms = dataclasses.replace(terms, causal=True)
            case SlidingWindow(int() | None, int() | None, offset=None | 0) if terms.window is None:
                before, after = (case.length if side is None else side for side in (part.left, part.right))
                terms = dataclasses.replace(terms, window=(before, after))
            case Segments(kv_ids=None) if terms.segments is None:
                terms = dataclasses.replace(terms, segments=part)
            case _:
                terms = dataclasses.replace(terms, rest=part if terms.rest is None else terms.rest & part)
    return terms


def _all(*masks: Mask | None) -> Mask | None:
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(And, given) if given else None


def _jax_nn(case: Case) -> Ready:
    """`jax.nn.dot_product_attention`: causal and window as arguments, the rest as an array."""
    return _like_jax_nn(case, jax.nn.dot_product_attention, PEERS["jax.nn"].describe())


def _flax(case: Case) -> Ready:
    """`flax.nnx.dot_product_attention`: causal as an argument, the rest as an array."""
    nnx: Any = importlib.import_module("flax.nnx")
    terms = _terms(case)
    window = None if terms.window is None else SlidingWindow(*terms.window)
    dense = case.dense(_all(window, terms.segments, terms.rest))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
        return nnx.dot_product_attention(query, key, value, mask=mask, is_causal=terms.causal)

    return compile_jax(case, attend, dense, PEERS["flax.nnx"].describe())


def _tokamax(case: Case) -> Ready:
    """`tokamax.dot_product_attention`, which has jax.nn's arguments and picks its implementation by device."""
    tokamax = importlib.import_module("tokamax")
    return _like_jax_nn(case, tokamax.dot_product_attention, PEERS["tokamax"].describe())


def _like_jax_nn(case: Case, function: Callable[..., jax.Array], what: str) -> Ready:
    terms = _terms(case)
    dense = case.dense(_all(terms.segments, terms.rest))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
        return function(
            query, key, value, mask=mask, is_causal=terms.causal, local_window_size=terms.window
        )  # fmt: skip

    return compile_jax(case, attend, dense, what)


def _ejkernel(case: Case) -> Ready:
    """`ejkernel.modules.flash_attention`: causal, window and segments as arguments, or the whole mask as an array."""
    flash_attention = importlib.import_module("ejkernel.modules").flash_attention
    MaskInfo = importlib.import_module("ejkernel.types").MaskInfo
    terms = _terms(case)
    precision = jax.lax.Precision.HIGHEST if case.dtype == "float32" else jax.lax.Precision.DEFAULT
    if terms.rest is not None:
        extra = case.dense(case.mask)
        assert extra is not None
        extra = jnp.broadcast_to(extra, (case.batch, *extra.shape[1:]))  # ejkernel does not broadcast a batch of 1
        terms = _Terms()
    else:
        ids = None if terms.segments is None else terms.segments.bind(*case.shape).q_ids
        extra = None if ids is None else jnp.broadcast_to(jnp.asarray(ids), (case.batch, case.length))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, extra: jax.Array | None) -> jax.Array:
        info = None
        if extra is not None:
            info = MaskInfo.from_segments(extra) if extra.ndim == 2 else MaskInfo.from_attention_mask(extra)
        return flash_attention(
            query, key, value, mask_info=info, causal=terms.causal, sliding_window=terms.window, precision=precision
        )  # fmt: skip

    return compile_jax(case, attend, extra, PEERS["ejkernel"].describe())


def _torch(case: Case) -> Ready:
    """`torch.nn.functional.scaled_dot_product_attention`, eager: ``is_causal``, or the whole mask as an array.

    It runs on CUDA if both torch and JAX find a GPU.
    """
    torch: Any = importlib.import_module("torch")
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    if (device == "cpu") != (jax.default_backend() == "cpu"):
        raise Refused(f"this torch does not run on {jax.default_backend()}, where JAX does")
    terms = _terms(case)
    only_causal = terms == _Terms(causal=True)
    dense = None if only_causal else case.dense(_all(case.mask if terms != _Terms() else None))
    mask = None if dense is None else torch.from_numpy(jax.device_get(dense).copy()).to(device)
    options = {"attn_mask": mask, "is_causal": only_causal, "enable_gqa": case.heads != case.K}
    function = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)
    return run_torch(case, function, device, f"{PEERS['torch'].describe()} on {device}")


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("jax.nn", "jax", _jax_nn, "jax.nn.dot_product_attention", cache_peers.jax_nn),
        Peer("flax.nnx", "flax", _flax, "flax.nnx.dot_product_attention", cache_peers.flax_nnx),
        Peer("torch", "torch", _torch, "torch.nn.functional.scaled_dot_product_attention", cache_peers.torch),
        Peer("tokamax", "tokamax", _tokamax, "tokamax.dot_product_attention"),
        Peer("ejkernel", "ejkernel", _ejkernel, "ejkernel.modules.flash_attention"),
    )
}
