"""Rotary position embeddings: pairs of features rotated by an angle proportional to the position.

RoPE (Su et al. 2021, arXiv:2104.09864) rotates pair i of a head's first R features by ``position * base ** (-2i / R)``,
so that q·k depends only on the distance of the two tokens. A `RotaryScaling` changes the frequencies for lengths beyond
the trained ones. The values equal Hugging Face transformers' ``modeling_rope_utils``.

    sin, cos = rotary_tables(config, positions)  # once per step, for all layers
    query = apply_rotary(query, sin, cos, interleaved=config.interleaved)
    key = apply_rotary(key, sin, cos, interleaved=config.interleaved)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from attnops.models.configs import read, text_config

if TYPE_CHECKING:
    from attnops.typing import Array

Frequencies = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """No scaling; the base class of scalings, whose fields are the keys that they read from ``rope_scaling``."""

    def __post_init__(self) -> None:
        for name in ("factor", "max_position_embeddings", "original_max_position_embeddings"):
            if not getattr(self, name, 1) > 0:
                raise ValueError(f"{type(self).__name__}: {name}={getattr(self, name)} must be > 0")

    def frequencies(self, base: float, dim: int, seq_len: int | None) -> Frequencies:
        """Radians per position for each of the ``dim // 2`` pairs, float64."""
        return np.asarray(base ** -(np.arange(0, dim, 2) / dim))

    def attention_scaling(self) -> float:
        """The factor by which sin and cos are multiplied."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
    """Every frequency divided by ``factor`` (position interpolation, Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def frequencies(self, base: float, dim: int, seq_len: int | None) -> Frequencies:
        return super().frequencies(base, dim, seq_len) / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicNTKScaling(RotaryScaling):
    """A base that grows once ``seq_len`` exceeds ``max_position_embeddings`` (bloc97 and emozilla, 2023).

    A query and its keys must be rotated with the same ``seq_len``: keys cached under a shorter one do not fit later
    queries. Use the greatest length that will be reached, or cache keys before their rotation.
    """

    factor: float
    max_position_embeddings: int

    def frequencies(self, base: float, dim: int, seq_len: int | None) -> Frequencies:
        trained = self.max_position_embeddings
        if seq_len is None or dim <= 2:
            raise ValueError(
                f"DynamicNTKScaling: seq_len={seq_len} must be a static int and rotary_dim={dim} more than 2; "
                f"pass the sequence's length (up to {trained} the base is unchanged)"
            )
        scale = self.factor * max(seq_len, trained) / trained - (self.factor - 1)
        return super().frequencies(base * scale ** (dim / (dim - 2)), dim, seq_len)


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): slow pairs divided by ``factor``, fast ones kept, a ramp between."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0  # rotations within the original length: pairs with more are kept
    beta_slow: float = 1.0  # pairs with fewer rotations are divided
    attention_factor: float | None = None  # None: from factor and the two mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the ends of the ramp are rounded to integers

    def frequencies(self, base: float, dim: int, seq_len: int | None) -> Frequencies:
        def pair_with(rotations: float) -> float:
            return (
                dim * math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))
            )

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # dim - 1, although there are dim // 2 pairs, as in the reference implementation that models are trained with.
        low, high = max(low, 0), min(high, dim - 1)
        divided = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return np.asarray(super().frequencies(base, dim, seq_len) * (1 - divided + divided / self.factor))

    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1: slow pairs divided by ``factor``, fast ones kept, a blend between."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # rotations within the original length: pairs with fewer are divided
    high_freq_factor: float = 4.0  # pairs with more rotations are kept

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (low := self.low_freq_factor) < (high := self.high_freq_factor):
            raise ValueError(f"Llama3Scaling: low_freq_factor={low} must be below high_freq_factor={high}")

    def frequencies(self, base: float, dim: int, seq_len: int | None) -> Frequencies:
        plain = super().frequencies(base, dim, seq_len)
        rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = np.clip((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return np.asarray(plain * (kept + (1 - kept) / self.factor))


# Keys that a dict of any rope type may have besides its scaling's keys; other code reads them.
_NO_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
SCALINGS: Mapping[str, type[RotaryScaling]] = {
    "default": RotaryScaling,
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How a model rotates its heads; hashable, so it can be a static argument of ``jax.jit``."""

    head_dim: int  # D of the tensors to be rotated
    rotary_dim: int | None = None  # R, even: the first R features are rotated, the others unchanged; None: all D
    base: float = 10_000.0  # "rope_theta"; > 1
    scaling: RotaryScaling = field(default_factory=RotaryScaling)
    interleaved: bool = False  # pair i is features (2i, 2i + 1), as in GPT-J; else (i, i + R / 2), as in NeoX and Llama

    def __post_init__(self) -> None:
        rotated = self.rotated_dim
        if rotated % 2 or not 2 <= rotated <= self.head_dim:
            raise ValueError(
                f"rotary_dim={rotated} must be even and from 2 to head_dim={self.head_dim}; features rotate in pairs"
            )
        if not self.base > 1:
            raise ValueError(f"base={self.base} must be > 1, so that later pairs rotate more slowly; 10000 is usual")

    @property
    def rotated_dim(self) -> int:
        """R, the number of rotated features."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @classmethod
    def from_config(cls, config: object, *, layer_type: str | None = None, **overrides: Any) -> Self:
        """Read a Hugging Face config, an object or a ``config.json``'s dict; ``overrides`` replace its fields.

        If the config is multimodal, its ``text_config`` is read.

        The config may have ``rope_parameters`` or ``rope_scaling``, whose ``rope_type`` (older: ``type``) must be in
        `SCALINGS`. If these vary by layer, ``layer_type`` selects one. Few configs state which features are pairs: for
        GPT-J, Cohere, GLM, ERNIE and Llama 4 pass ``interleaved=True``.

        Raises ValueError for an unknown rope type, for a key that its type lacks or does not read (it was meant to
        change the result), and for parameters by layer without such a ``layer_type``.
        """
        config = text_config(config)
        parameters = _parameters(config, layer_type)
        # Configs of latent attention give the number of rotated features; a fraction in the same config refers to the
        # whole head.
        latent = read(config, "qk_rope_head_dim")
        head_dim = overrides.get("head_dim") or latent or _head_dim(config)
        share = read(parameters, "partial_rotary_factor") or read(config, "partial_rotary_factor", "rotary_pct") or 1
        share = _one_number("partial_rotary_factor", share)
        base = read(parameters, "rope_theta") or read(config, "rope_theta", "rotary_emb_base") or cls.base
        values: dict[str, Any] = {
            "head_dim": head_dim,
            "rotary_dim": latent or read(config, "rotary_dim") or int(head_dim * share),
            "base": _one_number("rope_theta", base),
            "interleaved": bool(read(config, "rope_interleave")),
        }
        if "scaling" not in overrides:
            values["scaling"] = _scaling(parameters, config)
        return cls(**(values | overrides))


_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")


def _head_dim(config: object) -> int:
    sizes = {}
    for names in (_HEAD_DIM, ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")):
        if value := read(config, *names):
            sizes[names[0]] = int(_one_number(names[0], value))
        if "head_dim" in sizes:
            return sizes["head_dim"]
    if len(sizes) < 2:
        raise ValueError("the config has neither head_dim nor hidden_size and num_attention_heads; pass head_dim=")
    return sizes["hidden_size"] // sizes["num_attention_heads"]


def _one_number(name: str, value: Any) -> float:
    """A config's number; if it is a list, it must have the same number for each layer.

    Raises:
        ValueError: it varies by layer, or is not a number.
    """
    by_layer = value if isinstance(value, (list, tuple)) else [value]
    if not by_layer or not all(isinstance(x, (int, float)) and x == by_layer[0] for x in by_layer):
        raise ValueError(
            f"the config's {name}={value!r} must be one number; where layers differ, pass head_dim= or base= of the "
            f"layer, or a config of its own"
        )
    number: float = by_layer[0]
    return number


def _parameters(config: object, layer_type: str | None) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = read(config, "rope_parameters", "rope_scaling") or {}
    by_layer = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if not by_layer:
        return parameters
    if layer_type not in by_layer:
        raise ValueError(
            f"layer_type={layer_type!r} must be one of {sorted(by_layer)}: the rope_parameters differ by layer"
        )
    return by_layer[layer_type]


def _scaling(parameters: Mapping[str, Any], config: object) -> RotaryScaling:
    kind = read(parameters, "rope_type", "type") or "default"
    if kind not in SCALINGS:
        raise ValueError(
            f"rope_type={kind!r} must be one of {sorted(SCALINGS)}; else pass scaling= a RotaryScaling of your own"
        )
    wanted = {f.name: f for f in fields(SCALINGS[kind])}
    given = {key: value for key, value in parameters.items() if value is not None}
    if unread := sorted(given.keys() - wanted - _NO_SCALING):
        raise ValueError(
            f"rope_type={kind!r} reads only {sorted(wanted)} and the config also gives {unread}; "
            "remove these if your use does not depend on them, else pass scaling= a RotaryScaling of your own"
        )
    longest = read(config, "max_position_embeddings", "n_positions")
    # In transformers' order: the model's own original length, its parameters', its longest.
    original = read(config, "original_max_position_embeddings") or read(given, "original_max_position_embeddings")
    original = original or longest
    lengths = {"max_position_embeddings": longest, "original_max_position_embeddings": original}
    if kind == "yarn" and longest and original:
        given.setdefault("factor", longest / original)
    values = {key: value for key, value in (given | lengths).items() if key in wanted and value is not None}
    if missing := sorted(key for key, f in wanted.items() if f.default is MISSING and key not in values):
        raise ValueError(
            f"rope_type={kind!r} needs {missing}, which the config does not give; add it, or pass scaling="
        )
    return SCALINGS[kind](**values)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: ``0.1 * mscale * ln(factor) + 1``, or 1 without scaling (``factor <= 1``).

    DeepSeek also multiplies the softmax scale by ``yarn_mscale(factor, mscale_all_dim) ** 2``; the caller does that.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(config: RotaryConfig, *, seq_len: int | None = None) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per position of each pair, ``[R // 2]`` float32, and the factor for sin and cos (1 except with YaRN).

    A host constant, computed in float64 and rounded once. ``seq_len`` is the sequence's length including cached
    tokens, a static int; only `DynamicNTKScaling` reads it, and raises ValueError without it.
    """
    frequencies = config.scaling.frequencies(config.base, config.rotated_dim, seq_len)
    return frequencies.astype(np.float32), config.scaling.attention_scaling()


def rotary_tables(config: RotaryConfig, positions: Array, *, seq_len: int | None = None) -> tuple[jax.Array, jax.Array]:
    """``(sin, cos)`` of every pair's angle, each ``[B, T, R // 2]`` float32 and multiplied by the attention scaling.

    Args:
        config: head dim, base and scaling.
        positions: ``[B, T]`` integers, or ``[T]`` for all of the batch (tables ``[T, R // 2]``); each counted
            from the start of the token's own sequence. Float32 holds them exactly below 2 ** 24.
        seq_len: as for `inverse_frequencies`.

    Raises:
        ValueError: positions are not integers of rank 1 or 2, or `DynamicNTKScaling` lacks ``seq_len``.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.ndim not in (1, 2):
        raise ValueError(
            f"positions of shape {positions.shape} and dtype {positions.dtype} must be integers, [B, T] or [T]; "
            "to interpolate them use a RotaryScaling"
        )
    frequencies, scaling = inverse_frequencies(config, seq_len=seq_len)
    # Elementwise and not a matmul, whose default precision on accelerators would round large positions.
    angles = jnp.asarray(positions)[..., None].astype(jnp.float32) * frequencies
    return jnp.sin(angles) * scaling, jnp.cos(angles) * scaling


def apply_rotary(
    x: jax.Array, sin: jax.Array, cos: jax.Array, *, layout: Literal["BTHD", "BHTD"] = "BTHD", interleaved: bool = False
) -> jax.Array:
    """Rotate the first R features of each head of a query or a key; the others are unchanged.

    Args:
        x: ``[B, T, H, D]``, or ``[B, H, T, D]`` for ``layout="BHTD"``; floating.
        sin: ``[B, T, R // 2]``, ``[1, T, R // 2]`` or ``[T, R // 2]`` from `rotary_tables`; R <= D.
        cos: same shape as sin.
        layout: the order of x's axes.
        interleaved: whether pair i is features (2i, 2i + 1) rather than (i, i + R / 2).

    Returns:
        x's shape and dtype, computed in float32 (float64 for float64). Linear in x in memory.

    Raises:
        ValueError: the layout is unknown, x is not floating, or the shapes are not as above.
    """
    if layout not in ("BTHD", "BHTD"):
        raise ValueError(f'layout={layout!r} must be "BTHD" or "BHTD"')
    half, tokens = sin.shape[-1], x.shape[layout.index("T") :][:1]
    fits = x.ndim == 4 and 2 * half <= x.shape[-1] and sin.ndim in (2, 3)
    fits = fits and sin.shape[-2:-1] == tokens and sin.shape[:-2] in ((), (1,), x.shape[:1])
    _require(fits, x, sin, cos, f"[B, T, R // 2] or [T, R // 2], R <= D, for x in layout {layout}; see rotary_tables")
    sin, cos = (jnp.expand_dims(table, layout.index("H") - 4).astype(_wide(x)) for table in (sin, cos))
    pairs = x[..., : 2 * half].astype(_wide(x))
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else jnp.split(pairs, 2, axis=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = jnp.stack([a, b], axis=-1).reshape(pairs.shape) if interleaved else jnp.concatenate([a, b], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def rotate_half(x: jax.Array) -> jax.Array:
    """A quarter turn of each pair (i, i + D / 2) of ``x [..., D]``: halves ``(a, b)`` become ``(-b, a)``.

    Shape and dtype are x's. Raises ValueError for an odd D.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"x of shape {x.shape} must have an even last dimension, not {x.shape[-1]}; features rotate in pairs"
        )
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


def apply_rotary_pos_emb(tensor: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """``tensor * cos + rotate_half(tensor) * sin``, with tables for all positions from 0 on.

    For chosen positions, part of the features or another layout use `apply_rotary`.

    Args:
        tensor: ``[B, H, S, D]``, floating, D even.
        sin: ``[1 or B, 1 or H, >= S, D]`` or ``[>= S, D]``; the first S positions are used; both halves of D are equal.
        cos: same shape as sin.

    Returns:
        ``[B, H, S, D]`` in tensor's dtype, computed in float32 (float64 for float64).

    Raises:
        ValueError: tensor is not floating, or the shapes are not as above.
    """
    fits = tensor.ndim == 4 and sin.ndim in (2, 4) and sin.shape[-1] == tensor.shape[-1]
    fits = fits and sin.shape[-2] >= tensor.shape[-2]
    fits = fits and all(n in (1, m) for n, m in zip(sin.shape[:-2], tensor.shape, strict=False))
    _require(fits, tensor, sin, cos, "[1 or B, 1 or H, >= S, D] or [>= S, D], for x [B, H, S, D]; make longer tables")
    sin, cos = (table[..., : tensor.shape[-2], :].astype(_wide(tensor)) for table in (sin, cos))
    wide = tensor.astype(_wide(tensor))
    return (wide * cos + rotate_half(wide) * sin).astype(tensor.dtype)


def _wide(x: jax.Array) -> Array:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _require(fits: bool, x: jax.Array, sin: jax.Array, cos: jax.Array, rule: str) -> None:
    if not fits or sin.shape != cos.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x of shape {x.shape} and dtype {x.dtype}, sin {sin.shape} and cos {cos.shape} must fit: "
            f"x must be floating, sin and cos {rule}"
        )
