"""LinearRequest: the static description of a call of linear attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from attnops import Request


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LinearRequest(Request):
    """The static description of a call of linear attention.

    Attributes:
        batch: B.
        length: T, in tokens.
        key_heads: K, the heads of query and key; a divisor of Hv.
        value_heads: Hv, the heads of value, decay, beta and state.
        head_dim: D, of query and key.
        value_head_dim: Dv, of value and output.
        decay: ``"none"``, ``"constant"`` [Hv], ``"head"`` [B, T, Hv] or ``"channel"`` [B, T, Hv, D].
        beta: whether the call has betas: the delta rule.
        mask_kinds: the classes of the call's masks, of "Segments" and "KeyPadding".
        initial_state: whether the call has an initial state.
        return_state: whether the state is asked for.
    """

    computes: ClassVar[str] = "linear_attention"

    batch: int
    length: int
    key_heads: int
    value_heads: int
    head_dim: int
    value_head_dim: int
    decay: str = "none"
    beta: bool = False
    mask_kinds: frozenset[str] = frozenset()
    initial_state: bool = False
    return_state: bool = False

    def __str__(self) -> str:
        shape = (
            f"B{self.batch} T{self.length} K{self.key_heads} Hv{self.value_heads} D{self.head_dim} "
            f"Dv{self.value_head_dim}"
        )
        return f"{shape} {'/'.join(self.dtypes)} {super().__str__()}, decay by {self.decay}"
