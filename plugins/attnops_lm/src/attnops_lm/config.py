"""The config of a model: sizes and choices, with the same fields for every family."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from attnops_lm.rotary import RotaryConfig

LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each MLP (Shazeer et al. 2017, arXiv:1701.06538), as in GPT-OSS."""

    count: int  # experts of a layer
    per_token: int  # experts that compute a token
    limit: float  # gates are clipped to at most this, ups to between −limit and limit
    alpha: float  # gate · sigmoid(alpha · gate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a decoder. Hashable, so it can be a static argument of ``jax.jit``."""

    family: str
    vocab_size: int  # V
    hidden_size: int  # M
    intermediate_size: int  # of an MLP, or of one expert
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K, a divisor of H
    head_dim: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    rotary: tuple[tuple[LayerType, RotaryConfig], ...]  # by type of layer
    layer_types: tuple[LayerType, ...]  # [L]
    sliding_window: int | None = None  # tokens that a query of a sliding layer sees, itself included
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised by head, before they are rotated
    sinks: bool = False
    softmax_scale: float | None = None  # None: D ** -0.5
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    unit_offset: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # the outputs of attention and MLP are normalised too
    embedding_scale: float = 1.0
    experts: Experts | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: queries share keys"
            )
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types given, but num_layers={self.num_layers}")
        if unknown := set(self.layer_types) - set(get_args(LayerType)):
            raise ValueError(f"layer_types has {sorted(unknown)}, but each must be one of {get_args(LayerType)}")
        if missing := set(self.layer_types) - {kind for kind, _ in self.rotary}:
            raise ValueError(f"rotary has no entry for {sorted(missing)}, which layer_types has")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("sliding_window=None, but layer_types has sliding_attention: give the window's tokens")

    def rotary_of(self, kind: LayerType) -> RotaryConfig:
        """How layers of this type rotate queries and keys."""
        return dict(self.rotary)[kind]

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None for all before it."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def replace(self, **changes: object) -> Config:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
