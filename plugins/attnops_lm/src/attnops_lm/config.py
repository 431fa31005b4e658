"""The config of a model: sizes and choices, with the same fields for every family."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from attnops_lm.rotary import RotaryConfig

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each MLP (Shazeer et al. 2017, arXiv:1701.06538), as in GPT-OSS, or with one
    that all tokens share, as in Qwen3-Next.
    """

    count: int  # experts of a layer
    per_token: int  # experts that compute a token
    limit: float = 7.0  # of GPT-OSS: gates are clipped to at most this, ups to between −limit and limit
    alpha: float = 1.702  # of GPT-OSS: gate · sigmoid(alpha · gate)
    shared_size: int | None = None  # the width of the shared expert; None: GPT-OSS's experts
    normalised: bool = True  # weights of a token's experts add up to 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """The rule and the sizes of linear layers: a gated delta rule, as in Qwen3-Next, or Mamba-2, as in Bamba."""

    rule: Literal["delta", "mamba2"]
    key_heads: int  # a divisor of value_heads; Mamba-2's groups
    value_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    width: int  # of the convolution, in tokens
    bias: bool = False  # of Mamba-2's projections
    conv_bias: bool = False

    @property
    def values(self) -> int:
        """The features of all values."""
        return self.value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: all of queries, keys and values."""
        return 2 * self.key_heads * self.head_dim + self.values


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
    has_head: bool = True  # False: a model for embeddings, whose logits are NaN
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
    linear: LinearSizes | None = None  # of linear layers
    attention_gate: bool = False  # attention's outputs are multiplied by a sigmoid of the input
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
        if missing := set(self.layer_types) - {kind for kind, _ in self.rotary} - {"linear_attention"}:
            raise ValueError(f"rotary has no entry for {sorted(missing)}, which layer_types has")
        if {"linear_attention"} == set(self.layer_types):
            raise ValueError(
                "layer_types has linear_attention alone, but one layer must have another: its cache counts tokens"
            )
        if self.has_linear_layers and self.linear is None:
            raise ValueError("linear=None, but layer_types has linear_attention: give its sizes")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("sliding_window=None, but layer_types has sliding_attention: give the window's tokens")

    @property
    def has_linear_layers(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return "linear_attention" in self.layer_types

    def require_head(self) -> None:
        """Raise `ValueError` if the model has no head over the vocabulary, which its caller needs."""
        if not self.has_head:
            raise ValueError(
                "the model has no head over the vocabulary, since its checkpoint is one for embeddings: it gives only "
                "hidden states"
            )

    def rotary_of(self, kind: LayerType) -> RotaryConfig:
        """How layers of this type rotate queries and keys."""
        return dict(self.rotary)[kind]

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None for all before it."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def replace(self, **changes: object) -> Config:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
