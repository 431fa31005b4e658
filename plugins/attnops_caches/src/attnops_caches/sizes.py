"""How many pages fit a device's memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Unpack

import jax
import jax.numpy as jnp

from attnops_caches.integers import check_size
from attnops_caches.layout import TokenOptions, layout_of

if TYPE_CHECKING:
    from attnops.typing import DType

_PLATFORMS: Final = ("cpu", "gpu", "cuda", "rocm", "tpu")


def bytes_per_page(*, page_size: int, platform: str | None = None, **tokens: Unpack[TokenOptions]) -> int:
    """The bytes of one page of a `PagedCache` in all its layers, with its scales and the padding of the platform.

    A TPU stores the last two dimensions of an array in tiles of (8, 128) for 4-byte elements, (16, 128) for 2-byte and
    (32, 128) for 1-byte ones, and pads both to multiples: the ``[page_size, W]`` of keys and values, and the
    ``[K, page_size]`` of scales by token and head. On CPUs and GPUs nothing is padded.

    Args:
        page_size: slots per page.
        platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``. None: of JAX's default backend.
        **tokens: `TokenOptions`, what the cache is created with; scales that are given to it may be left out.

    Raises:
        ValueError: see `PagedCache.create`; a platform with another layout.
    """
    platform = jax.default_backend() if platform is None else platform
    if platform not in _PLATFORMS:
        raise ValueError(f"platform={platform!r}, but the layout of arrays is known for {[*_PLATFORMS]} only")
    layout, K, lead = layout_of(tokens, joins=True)
    shape = K, check_size("page_size", page_size), layout.elements(layout.width)
    size = _stored_bytes(shape, layout.stored_dtype, platform)
    if layout.has_token_scales:
        size += (1 if layout.content == "latent" else 2) * _stored_bytes((K, page_size), jnp.float32, platform)
    return math.prod(lead) * size


def pages_that_fit(
    *,
    hbm_utilization: float,
    page_size: int,
    max_model_length: int | None = None,
    device: jax.Device | None = None,
    bytes_limit: int | None = None,
    bytes_in_use: int | None = None,
    platform: str | None = None,
    **tokens: Unpack[TokenOptions],
) -> int:
    """How many pages of a `PagedCache` fit a share of one device's memory: its argument ``pages``.

    They are ``hbm_utilization * bytes_limit - bytes_in_use`` bytes divided by `bytes_per_page`, rounded down; 0 where
    more is in use than the share. Load the model before: its weights count as in use. Where a mesh shards the cache,
    give one device's ``kv_heads`` and ``page_size``, and the result is each device's number of pages.

    Args:
        hbm_utilization: the share of the memory for weights and pages, above 0, at most 1; the rest is for temporaries.
        page_size: slots per page.
        max_model_length: tokens of the longest sequence. If given, the pages must hold it.
        device: whose memory; None for JAX's first local device.
        bytes_limit: the bytes of the memory. None: as the device reports, which CPUs do not.
        bytes_in_use: the bytes of it that are in use. None: as the device reports, or 0 with ``bytes_limit``.
        platform: as in `bytes_per_page`; None for the device's.
        **tokens: `TokenOptions`, what the cache is created with; scales that are given to it may be left out.

    Raises:
        ValueError: see `bytes_per_page`; a share outside its range; memory that the device does not report; pages that
            do not hold one sequence of ``max_model_length``.
    """
    if isinstance(hbm_utilization, bool) or not 0 < hbm_utilization <= 1:
        raise ValueError(f"hbm_utilization={hbm_utilization!r} must be above 0 and at most 1, a share of the memory")
    if bytes_limit is None:
        device = jax.local_devices()[0] if device is None else device
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"device={device} does not report its memory; give bytes_limit=, the bytes of the memory, and "
                f"bytes_in_use= if some of it is taken"
            )
        bytes_limit = stats["bytes_limit"]
        bytes_in_use = stats.get("bytes_in_use", 0) if bytes_in_use is None else bytes_in_use
    if platform is None and device is not None:
        platform = device.platform
    page = bytes_per_page(page_size=page_size, platform=platform, **tokens)
    budget = int(hbm_utilization * bytes_limit) - (bytes_in_use or 0)
    pages = max(budget, 0) // page
    if max_model_length is not None and pages * page_size < check_size("max_model_length", max_model_length):
        raise ValueError(
            f"{pages} pages of {page_size} tokens fit {max(budget, 0)} bytes, but one sequence of max_model_length="
            f"{max_model_length} needs {math.ceil(max_model_length / page_size)} of {page} bytes each: lower it, raise "
            f"hbm_utilization, or store tokens by a codec"
        )
    return pages


def _stored_bytes(shape: tuple[int, ...], dtype: DType, platform: str) -> int:
    """The bytes of an array of rank 2 at least as a platform stores it."""
    size = jnp.dtype(dtype).itemsize
    *lead, rows, columns = shape
    if platform == "tpu":
        rows, columns = (-(-n // tile) * tile for n, tile in ((rows, 32 // size), (columns, 128)))
    return math.prod(lead) * rows * columns * size
