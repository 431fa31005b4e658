"""Sizes of caches against numbers that are computed by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops_caches import PagedCache, Quantized, bytes_per_page, pages_that_fit

LLAMA: dict[str, Any] = {"kv_heads": 8, "head_dim": 128}
MLA: dict[str, Any] = {"kv_heads": 1, "head_dim": 576, "latent": 512}
MIB = 2**20


class Device:
    """A device that reports its memory."""

    def __init__(self, platform: str, **stats: int) -> None:
        self.platform, self.stats = platform, stats

    def memory_stats(self) -> dict[str, int]:
        return self.stats


@pytest.mark.parametrize(
    ("sizes", "cpu", "tpu"),
    [
        # keys and values, 8 heads, 16 slots, 128 features, 2 bytes: whole tiles of (16, 128)
        ({"page_size": 16, **LLAMA}, 2 * 8 * 16 * 128 * 2, 2 * 8 * 16 * 128 * 2),
        ({"page_size": 16, **LLAMA, "layers": 32}, 32 * 65_536, 32 * 65_536),
        # tiles of (8, 128) in float32; 12 slots are stored as 16, 160 features as 256
        (
            {"page_size": 12, "kv_heads": 3, "head_dim": 80, "dtype": jnp.float32},
            2 * 3 * 12 * 80 * 4,
            2 * 3 * 16 * 128 * 4,
        ),
        # 8 slots of 2 bytes are stored as 16; 64 features of a key and 64 of a value fill the lanes, 64 and 192 too
        ({"page_size": 8, "kv_heads": 2, "head_dim": 64}, 2 * 2 * 8 * 64 * 2, 2 * 16 * 128 * 2),
        (
            {"page_size": 8, "kv_heads": 2, "head_dim": 64, "value_head_dim": 192},
            2 * 8 * (64 + 192) * 2,
            2 * 16 * 256 * 2,
        ),
        # tiles of (32, 128) in int8: 16 slots are stored as 32; scales [8, 16] float32 as [8, 128]
        (
            {"page_size": 16, **LLAMA, "codec": Quantized("int8")},
            2 * (8 * 16 * 128 + 8 * 16 * 4),
            2 * (8 * 32 * 128 + 8 * 128 * 4),
        ),
        # int4: 128 features of key and 128 of value are 128 bytes
        (
            {"page_size": 32, **LLAMA, "codec": Quantized("int4")},
            8 * 32 * 128 + 2 * 8 * 32 * 4,
            8 * 32 * 128 + 2 * 8 * 128 * 4,
        ),
        # 3 heads of scales as 8
        (
            {"page_size": 32, "kv_heads": 3, "head_dim": 128, "codec": Quantized("float8_e4m3fn")},
            2 * (3 * 32 * 128 + 3 * 32 * 4),
            2 * (3 * 32 * 128 + 8 * 128 * 4),
        ),
        # scales by head are of the cache, not of a page
        ({"page_size": 32, **LLAMA, "codec": Quantized("int8", "head")}, 2 * 8 * 32 * 128, 2 * 8 * 32 * 128),
        # 576 features are stored as 640: 1.11 times; no values
        ({"page_size": 64, **MLA}, 64 * 576 * 2, 64 * 640 * 2),
        # 160 of key and value as 256, on every platform if that is the width
        ({"page_size": 32, "kv_heads": 2, "head_dim": 80, "width": 256}, 2 * 32 * 256 * 2, 2 * 32 * 256 * 2),
    ],
)  # fmt: skip
def test_a_page_has_these_bytes(sizes: dict[str, Any], cpu: int, tpu: int) -> None:
    for platform in ("cpu", "gpu", "cuda", "rocm"):
        assert bytes_per_page(**sizes, platform=platform) == cpu
    assert bytes_per_page(**sizes, platform="tpu") == tpu


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": Quantized("int8")},
        {"codec": Quantized("float8_e5m2")},
        {"latent": 5},
        {"codec": Quantized("int4")},
        {"codec": Quantized("int4"), "latent": 5},
    ],
)
@pytest.mark.parametrize("layers", [None, 3])
def test_without_padding_they_are_the_bytes_of_the_arrays(options: dict[str, Any], layers: int | None) -> None:
    sizes = {"page_size": 7, "kv_heads": 3, "head_dim": 10, "layers": layers, **options}
    cache = PagedCache.create(batch=2, pages=5, max_pages=2, **sizes)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(cache.store))
    assert 5 * bytes_per_page(**sizes, platform="cpu") == nbytes == 5 * 7 * cache.bytes_per_token * (layers or 1)


def test_pages_fit_a_share_of_the_memory() -> None:
    # 0.9 · 64 MiB − 10 MiB are 47.6 MiB; a page of 2 layers is 2 · 64 KiB
    sizes = {"page_size": 16, **LLAMA, "layers": 2, "hbm_utilization": 0.9}
    device: Any = Device("tpu", bytes_limit=64 * MIB, bytes_in_use=10 * MIB)
    assert pages_that_fit(**sizes, device=device) == 380
    assert pages_that_fit(**sizes, bytes_limit=64 * MIB, bytes_in_use=10 * MIB, platform="tpu") == 380
    assert pages_that_fit(**sizes, device=device, bytes_in_use=0) == 460
    assert pages_that_fit(**sizes, bytes_limit=64 * MIB) == 460
    assert pages_that_fit(**sizes, bytes_limit=64 * MIB, bytes_in_use=60 * MIB) == 0


def test_the_padding_is_that_of_the_devices_platform() -> None:
    sizes = {"page_size": 8, "kv_heads": 2, "head_dim": 64, "hbm_utilization": 1.0}
    tpu: Any = Device("tpu", bytes_limit=MIB, bytes_in_use=0)
    gpu: Any = Device("gpu", bytes_limit=MIB, bytes_in_use=0)
    assert (pages_that_fit(**sizes, device=tpu), pages_that_fit(**sizes, device=gpu)) == (128, 256)
    assert pages_that_fit(**sizes, device=gpu, platform="tpu") == 128


def test_a_device_that_reports_no_memory_is_refused() -> None:
    device: Any = Device("cpu")
    device.memory_stats = lambda: None
    with pytest.raises(ValueError, match=r"does not report its memory; give bytes_limit=, the bytes of the memory"):
        pages_that_fit(hbm_utilization=0.9, page_size=16, **LLAMA, device=device)


def test_pages_that_do_not_hold_the_longest_sequence_are_refused() -> None:
    sizes = {"hbm_utilization": 1.0, "page_size": 16, **LLAMA, "bytes_limit": MIB, "platform": "cpu"}
    assert pages_that_fit(**sizes, max_model_length=256) == 16
    told = r"16 pages of 16 tokens fit 1048576 bytes, but one sequence of max_model_length=257 needs 17 of 65536"
    with pytest.raises(ValueError, match=told):
        pages_that_fit(**sizes, max_model_length=257)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hbm_utilization": 90}, r"hbm_utilization=90 must be above 0 and at most 1"),
        ({"hbm_utilization": 0.0}, r"hbm_utilization=0.0 must be above 0"),
        ({"platform": "tt"}, r"platform='tt', but the layout of arrays is known for .* only"),
        ({"page_size": 0}, r"page_size=0 must be an int of at least 1"),
        ({"kv_heads": 0}, r"kv_heads=0 must be an int of at least 1"),
        ({"dtype": jnp.int8}, r"dtype=int8 must be float32, bfloat16 or float16"),
        ({"latent": 200}, r"latent=200 must be at most head_dim=128"),
    ],
)
def test_sizes_outside_their_range_are_refused(changed: dict[str, Any], sentence: str) -> None:
    sizes = {"hbm_utilization": 0.9, "page_size": 16, **LLAMA, "bytes_limit": MIB, "platform": "cpu"}
    with pytest.raises(ValueError, match=sentence):
        pages_that_fit(**sizes | changed)
