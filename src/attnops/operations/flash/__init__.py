"""flash: attention in O(T) memory, in plain JAX laid out for a CPU."""

from attnops.operations.flash.operation import FlashAttention

__all__ = ["FlashAttention"]
