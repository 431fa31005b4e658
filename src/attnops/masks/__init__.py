"""Which query sees which key, as small expressions instead of T × S arrays."""

from attnops.masks.base import Mask
from attnops.masks.primitives import Causal, Dense

__all__ = ["Causal", "Dense", "Mask"]
