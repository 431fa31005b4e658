"""LinearOutput: what linear attention returns."""

from __future__ import annotations

from typing import NamedTuple

import jax


class LinearOutput(NamedTuple):
    """The result of linear attention.

    Attributes:
        attention_outputs: [B, T, Hv, Dv], in the query's dtype; 0 for padding.
        state: the state after each row's last token, [B, Hv, D, Dv] float32; None unless asked for.
    """

    attention_outputs: jax.Array
    state: jax.Array | None = None
