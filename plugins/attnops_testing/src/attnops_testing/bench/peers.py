"""Peers: other libraries' attention, an adapter for each, and their table."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from attnops.dispatch.platforms import platform_of
from attnops.masks import SlidingWindow
from attnops_testing.bench import cache_peers
from attnops_testing.bench import device_peers as device
from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.case import Case, Refused
from attnops_testing.bench.program import Contender, Ready, compile_jax, run_torch
from attnops_testing.bench.terms import Terms, all_of, terms_of


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another library's attention.

    Attributes:
        name: the name on the command line and in the table.
        package: the package that pip installs.
        adapt: makes the program for a case, from it and the function's name and version; None if the peer is measured
            over caches alone.
        function: what is called, for people to read.
        adapt_cache: the same for a call over a cache; None if the peer is not measured over caches.
        platforms: where it runs; empty for everywhere.
    """

    name: str
    package: str
    adapt: Callable[[Case, str], Ready] | None
    function: str = ""
    adapt_cache: Callable[[CacheCase, str], Ready] | None = None
    platforms: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether the package is installed; it is not imported."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return bool(importlib.metadata.version(self.package))
        return False

    def absent(self, platform: str) -> str:
        """Why it can't be measured on a platform; empty if it can."""
        if self.platforms and platform not in self.platforms:
            return f"not on this platform: it runs on {' and '.join(self.platforms)}, and this is {platform}"
        return "" if self.installed else f"{self.package} is not installed: pip install {self.package}"

    @property
    def contender(self) -> Contender:
        """The peer as a contender, which is refused if it is not installed."""
        return Contender(self.name, self._prepare, is_peer=True)

    def _prepare(self, case: Case | CacheCase) -> Ready:
        if reason := self.absent(platform_of(jax.devices()[0])):
            raise Refused(reason)
        if isinstance(case, Case):
            if self.adapt is None:
                raise Refused("it is measured over caches alone")
            return self.adapt(case, self.describe())
        if self.adapt_cache is None:
            raise Refused("it is not measured over caches")
        return self.adapt_cache(case, self.describe())

    def describe(self) -> str:
        """What runs, with its version."""
        return f"{self.function} {importlib.metadata.version(self.package)}"


def missing_peers() -> list[Peer]:
    """The peers for this platform that are not installed."""
    platform = platform_of(jax.devices()[0])
    return [peer for peer in PEERS.values() if not peer.installed and platform in (peer.platforms or (platform,))]


def _jax_nn(case: Case, what: str) -> Ready:
    """`jax.nn.dot_product_attention`: causal and window as arguments, the rest as an array."""
    return _like_jax_nn(case, jax.nn.dot_product_attention, what)


def _flax(case: Case, what: str) -> Ready:
    """`flax.nnx.dot_product_attention`: causal as an argument, the rest as an array."""
    nnx: Any = importlib.import_module("flax.nnx")
    terms = terms_of(case)
    window = None if terms.window is None else SlidingWindow(*terms.window)
    dense = case.dense(all_of(window, terms.segments, terms.rest))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
        return nnx.dot_product_attention(query, key, value, mask=mask, is_causal=terms.causal)

    return compile_jax(case, attend, dense, what)


def _tokamax(case: Case, what: str) -> Ready:
    """`tokamax.dot_product_attention`, which has jax.nn's arguments and picks its implementation by device."""
    tokamax = importlib.import_module("tokamax")
    return _like_jax_nn(case, tokamax.dot_product_attention, what)


def _like_jax_nn(case: Case, function: Callable[..., jax.Array], what: str) -> Ready:
    terms = terms_of(case)
    dense = case.dense(all_of(terms.segments, terms.rest))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
        return function(
            query, key, value, mask=mask, is_causal=terms.causal, local_window_size=terms.window
        )  # fmt: skip

    return compile_jax(case, attend, dense, what)


def _ejkernel(case: Case, what: str) -> Ready:
    """`ejkernel.modules.flash_attention`: causal, window and segments as arguments, or the whole mask as an array."""
    flash_attention = importlib.import_module("ejkernel.modules").flash_attention
    MaskInfo = importlib.import_module("ejkernel.types").MaskInfo
    terms = terms_of(case)
    precision = jax.lax.Precision.HIGHEST if case.dtype == "float32" else jax.lax.Precision.DEFAULT
    if terms.rest is not None:
        extra = case.dense(case.mask)
        assert extra is not None
        extra = jnp.broadcast_to(extra, (case.batch, *extra.shape[1:]))  # ejkernel does not broadcast a batch of 1
        terms = Terms()
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

    return compile_jax(case, attend, extra, what)


def _torch(case: Case, what: str) -> Ready:
    """`torch.nn.functional.scaled_dot_product_attention`, eager: ``is_causal``, or the whole mask as an array.

    It runs on CUDA if both torch and JAX find a GPU.
    """
    torch: Any = importlib.import_module("torch")
    on = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    if (on == "cpu") != (jax.default_backend() == "cpu"):
        raise Refused(f"this torch does not run on {jax.default_backend()}, where JAX does")
    terms = terms_of(case)
    only_causal = terms == Terms(causal=True)
    dense = None if only_causal else case.dense(all_of(case.mask if terms != Terms() else None))
    mask = None if dense is None else torch.from_numpy(jax.device_get(dense).copy()).to(on)
    options = {"attn_mask": mask, "is_causal": only_causal, "enable_gqa": case.heads != case.K}
    function = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)
    return run_torch(case, function, on, f"{what} on {on}")


def _cudnn(case: Case, what: str) -> Ready:
    """CuDNN by jax.nn."""
    device.check_dtype(case.dtype)
    return _like_jax_nn(case, functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), what)


_CUDA, _TPU = ("cuda",), ("tpu",)
_CUDNN_CACHED = functools.partial(cache_peers.jax_nn, implementation="cudnn")
PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("jax.nn", "jax", _jax_nn, "jax.nn.dot_product_attention", cache_peers.jax_nn),
        Peer("flax.nnx", "flax", _flax, "flax.nnx.dot_product_attention", cache_peers.flax_nnx),
        Peer("torch", "torch", _torch, "torch.nn.functional.scaled_dot_product_attention", cache_peers.torch),
        Peer("tokamax", "tokamax", _tokamax, "tokamax.dot_product_attention"),
        Peer("ejkernel", "ejkernel", _ejkernel, "ejkernel.modules.flash_attention"),
        Peer("cudnn", "jax", _cudnn, "jax.nn.dot_product_attention", _CUDNN_CACHED, _CUDA),
        Peer("flashinfer", "flashinfer-python", None, "flashinfer", device.flashinfer_cached, _CUDA),
        Peer("flywheel", "flywheel-tpu", device.flywheel, "flywheel_tpu", device.flywheel_cached, _TPU),
        Peer("rpa", "tpu-inference", None, "tpu_inference's ragged_paged_attention v3", device.rpa, _TPU),
    )
}
