"""The contenders of `gpu.py`; one that is not installed, or does not support a case, raises `Refused`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import jax

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal, SlidingWindow
from attnops_testing.bench.case import Case, Refused
from attnops_testing.bench.peers import PEERS
from attnops_testing.bench.program import Contender, Ready, compile_jax, run_torch
from attnops_triton.flash.order import unordered


def triton(interpret: bool, any_order: bool = False) -> Contender:
    """attnops-triton; raises `Refused` if the native forward would run instead.

    Args:
        interpret: whether Triton is interpreted.
        any_order: whether gradients are added in any order.
    """

    def prepare(case: Case) -> Ready:
        metadata = OperationMetadata(platform="cuda", on_unsupported="error", interpret=interpret)
        operation: Any = OperationRegistry.create("attnops-triton:flash", metadata)
        what = "attnops-triton:flash" + ", interpreted" * interpret + ", in any order" * any_order

        def attend(query: Any, key: Any, value: Any, _: Any) -> Any:
            with unordered() if any_order else contextlib.nullcontext():
                return operation(query, key, value, mask=case.mask).attention_outputs

        try:
            return compile_jax(case, attend, None, what)
        except UnsupportedError as error:
            raise Refused("; ".join(map(str, error.reasons))) from None

    return Contender("attnops-triton-unordered" if any_order else "attnops-triton", prepare)


def _cudnn(case: Case) -> Ready:
    if jax.default_backend() != "gpu":
        raise Refused("cuDNN needs a GPU")
    window = _window(case)
    causal = isinstance(case.mask, Causal) or window is not None
    dense = None if causal or case.mask is None else case.dense(case.mask)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=causal, implementation="cudnn",
            local_window_size=None if window is None else (window, 0),
        )  # fmt: skip

    return compile_jax(case, attend, dense, "jax.nn.dot_product_attention, cudnn")


def _window(case: Case) -> int | None:
    """The keys before its own that a query of a causal window sees; None for other masks."""
    other = getattr(case.mask, "right", None)  # of ``Causal() & other``
    return other.left if isinstance(other, SlidingWindow) else None


# The keys of a tile of Pallas's kernel, by head dim: of 64, 128 and 256, the fastest on an H200 that fits.
_MOSAIC_KEYS: Final = {64: 128, 128: 128, 256: 64}


def _mosaic(case: Case) -> Ready:
    """The Mosaic GPU kernel for Hopper in JAX's Pallas."""
    if case.dtype != "float16" or not (case.mask is None or isinstance(case.mask, Causal)):
        raise Refused("only float16, plain or causal: with bfloat16 JAX 0.11.2 raises a TypeError of its own")
    if case.backward and case.mask is not None:
        raise Refused("it has no backward pass with a causal mask")
    if case.head_dim not in _MOSAIC_KEYS:
        raise Refused(f"head_dim={case.head_dim} must be one of {list(_MOSAIC_KEYS)}")
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError as error:
        raise Refused(f"JAX has no Mosaic GPU kernels here: {error}") from None
    if jax.default_backend() != "gpu":
        raise Refused("it needs a GPU")
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=_MOSAIC_KEYS[case.head_dim], max_concurrent_steps=2, causal=case.mask is not None,
        **(backward if case.backward else {}),
    )  # fmt: skip
    scale = case.head_dim**-0.5  # which it leaves to the caller

    def attend(query: Any, key: Any, value: Any, _: Any) -> Any:
        return attention_mgpu.attention(query * scale, key, value, config)

    return compile_jax(case, attend, None, "jax.experimental.pallas.ops.gpu.attention_mgpu")


def _flex(case: Case) -> Ready:
    """FlexAttention of torch, compiled, with a block mask."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
        from torch.nn.attention import flex_attention as flex  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise Refused("torch is not installed: pip install torch") from None
    if not torch.cuda.is_available():
        raise Refused("torch sees no GPU")

    ids = torch.arange(case.length, device="cuda") // max(1, case.length // 4)
    block_mask = None
    if case.mask is not None:
        causal_only = isinstance(case.mask, Causal)
        window = _window(case)

        def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
            if window is not None:
                return (q >= kv) & (q - kv <= window)
            return q >= kv if causal_only else (q >= kv) & (ids[q] == ids[kv])

        block_mask = flex.create_block_mask(seen, None, None, case.length, case.length, device="cuda")
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def attend(*inputs: Any) -> Any:
        return compiled(*inputs, block_mask=block_mask)

    return run_torch(case, attend, "cuda", f"FlexAttention of torch {torch.__version__}")


# By name: makes the contender, given whether Triton is interpreted.
CONTENDERS: Final[dict[str, Callable[[bool], Contender]]] = {
    "attnops-triton": triton,
    "attnops-triton-unordered": lambda dry: triton(dry, any_order=True),
    "cuDNN": lambda dry: Contender("cuDNN", _cudnn, is_peer=True),
    "Mosaic": lambda dry: Contender("Mosaic", _mosaic, is_peer=True),
    "FlexAttention": lambda dry: Contender("FlexAttention", _flex, is_peer=True),
    "torch": lambda dry: PEERS["torch"].contender,
    "tokamax": lambda dry: PEERS["tokamax"].contender,
    "ejkernel": lambda dry: PEERS["ejkernel"].contender,
}
# Contenders that compute in torch: JAX then does not use the GPU.
USES_TORCH: Final = ("FlexAttention", "torch")
