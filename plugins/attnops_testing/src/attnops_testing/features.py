"""The features of the attention contract, as changes of a small problem; features of different groups combine."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops.dispatch.metadata import OperationMetadata
from attnops.masks import Mask
from attnops_testing.feature_masks import MASKS, PADDINGS, TRACED_MASKS, MaskCase, Padding, both_masks
from attnops_testing.fit import Fit
from attnops_testing.problem import Problem

if TYPE_CHECKING:
    from attnops.biases import Bias
    from attnops_testing.oracle import Array

# Array biases, by the dimensions that they have: the others are 1.
ARRAY_BIASES: Final = ("BHTS", "HTS", "TS", "S", "T", "BS")
# Fields of `Spec` that a feature may derive from those of the plain problem.
_DERIVED: Final = frozenset({"K", "Dv", "T", "S"})
# A score whose exponential overflows float32, while the softmax is still accurate.
_LARGE: Final = 150


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The description of a problem; the defaults are the plain problem, which every operation should serve.

    Attributes:
        block: queries, and keys, per tile; the unit of lengths.
        multiple: lengths that are given in tiles are rounded down to a multiple of this.
        T: (tiles, more): whole tiles of queries, and a number of further queries (an int) or a fraction of a tile.
        S: the same for keys; None for T.
        B, H, K, D: dimensions.
        Dv: None for D.
        dtype: the dtype of query, key, value and sinks.
        large: the scores of even queries are about 150, those of odd ones about −150, before soft cap and bias.
        mixed: whether key and value have another dtype: bfloat16 if ``dtype`` is float32, else float32.
        bias: one of `ARRAY_BIASES`, "rising", "-inf" or "lowest", or "ALiBi", "RelativePosition", "ScoreFn".
        bias_dtype: None for ``dtype``.
        mask: the mask of the problem, as in `attnops_testing.feature_masks.MASKS`; None for none.
        traced_mask: whether the mask's arrays are arguments of the compiled program rather than constants.
        padding: hides further tokens in addition to the mask.
        sinks: whether the call has sinks, [H].
        dropout_prob, softmax_scale, logits_soft_cap, return_lse, return_weights, return_max_logits: options of the
            call.
        layout, runtime_dtype: fields of the metadata; None to keep its values.
        own_tiles: whether the kernel chooses its tiles.
    """

    block: int = 16
    multiple: int = 1
    T: tuple[int, float] = (2, 0.5)
    S: tuple[int, float] | None = None
    B: int = 2
    H: int = 4
    K: int = 4
    D: int = 16
    Dv: int | None = None
    dtype: str = "float32"
    large: bool = False
    mixed: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
    mask: MaskCase | None = None
    traced_mask: bool = False
    padding: Callable[[int, int, int, int], Padding] | None = None
    sinks: bool = False
    dropout_prob: float = 0.0
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    return_lse: bool = False
    return_weights: bool = False
    return_max_logits: bool = False
    layout: str | None = None
    runtime_dtype: str | None = None
    own_tiles: bool = False

    def problem(self, metadata: OperationMetadata | None = None, seed: int = 0) -> Problem:
        """The problem, with random arrays.

        Args:
            metadata: the operation's metadata; its layout, dtype, dropout and tile sizes are replaced.
            seed: the seed of the arrays and cotangents.
        """
        rng = np.random.default_rng(seed + self.large)
        metadata = metadata or OperationMetadata()
        fit = Fit(block=self.block, multiple=self.multiple)
        T, S = (fit.tokens(*length) for length in (self.T, self.S or self.T))
        shape = self.B, self.H, T, S

        def draw(*shape: int, dtype: str | None = None) -> Array:
            # Bounded, with variance 1: with a long tail a single score would determine the error that the rule allows.
            return rng.uniform(-(3**0.5), 3**0.5, shape).astype(jnp.dtype(dtype or self.dtype))

        other = "bfloat16" if self.dtype == "float32" else "float32"
        kv_dtype = other if self.mixed else self.dtype
        query, key = draw(self.B, T, self.H, self.D), draw(self.B, S, self.K, self.D, dtype=kv_dtype)
        value = draw(self.B, S, self.K, self.Dv or self.D, dtype=kv_dtype)
        if self.large:
            # Scores vary only by query: if one key had all the weight, few errors would be visible.
            size = _LARGE / abs(self.softmax_scale or metadata.softmax_scale or self.D**-0.5)
            query[..., 0] = np.where(np.arange(T) % 2, -size, size)[:, None]
            key[..., 0] = 1
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "logits_soft_cap": self.logits_soft_cap,
            "return_lse": self.return_lse,
            "return_weights": self.return_weights,
            "return_max_logits": self.return_max_logits,
        }
        mask, visible, poison = self._mask(shape)
        if mask is not None:
            options["mask"] = mask
        if self.bias is not None:
            options["bias"] = _bias(self.bias, shape, draw, self.bias_dtype or self.dtype, self.block)
        if self.sinks:
            options["sinks"] = draw(self.H)
        dropout_prob = self.dropout_prob or metadata.dropout_prob
        if dropout_prob:
            options["dropout_key"] = jax.random.key(11)
        tile = None if self.own_tiles else self.block
        # Features take precedence over the metadata.
        metadata = metadata.replace(
            layout=self.layout or metadata.layout,
            runtime_dtype=self.runtime_dtype or metadata.runtime_dtype,
            dropout_prob=dropout_prob,
            block_q=metadata.block_q or tile,
            block_k=metadata.block_k or tile,
        )
        return Problem(
            query=query, key=key, value=value, options=options, metadata=metadata, seed=seed, visible=visible,
            poison=poison, traced_mask=self.traced_mask,
            score_pattern=_pattern(*np.ogrid[:T, :S]).astype(np.float64) if self.bias == "ScoreFn" else None,
        )  # fmt: skip

    def _mask(self, shape: tuple[int, int, int, int]) -> tuple[Mask | None, Array | Mask | None, dict[str, Array]]:
        mask = visible = None
        if self.mask is not None:
            mask, visible = self.mask(*shape)
        if self.padding is None:
            return mask, visible, {}
        padding = self.padding(*shape)
        if mask is None:
            return padding
        return mask & padding.mask, visible & padding.visible, padding.hidden


def _bias(
    kind: str, shape: tuple[int, int, int, int], draw: Callable[..., Array], dtype: str, block: int
) -> Array | Bias:
    B, H, T, S = shape
    if kind in ARRAY_BIASES:
        sizes = (size if letter in kind else 1 for letter, size in zip("BHTS", shape, strict=True))
        return draw(*sizes, dtype=dtype)
    if kind == "rising":
        return draw(1, H, 1, S, dtype=dtype) + (_LARGE * (np.arange(S) // block)).astype(jnp.dtype(dtype))
    if kind == "-inf":
        seen = (np.arange(T)[:, None] % 5 != 2) & (np.arange(S) % 3 != 1)
        return np.where(seen, draw(1, 1, T, S, dtype=dtype), np.asarray(-np.inf, jnp.dtype(dtype)))
    if kind == "lowest":
        # The way in which model code masks keys; in the last batch row all keys are masked. In float16 the sum with a
        # score must not overflow.
        hidden = (np.arange(S) % 3 == 1) | (np.arange(B) == B - 1)[:, None, None, None]
        return np.where(
            hidden, np.asarray(0.7 * float(jnp.finfo(dtype).min), jnp.dtype(dtype)), draw(1, 1, 1, S, dtype=dtype)
        )
    if kind == "ALiBi":
        return ALiBi(alibi_slopes(H))
    if kind == "RelativePosition":
        return RelativePosition(draw(16, H, dtype="float32"), max_distance=30)
    # A learned array, and integers, which have no gradient.
    return ScoreFn(_add_pattern, (draw(H, dtype="float32"), 2 * np.arange(S, dtype=np.int32)))


def _pattern(q: Array, kv: Array) -> Array:
    return (q + 2 * kv) % 3


def _add_pattern(
    scores: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array, factors: jax.Array, twice: jax.Array
) -> jax.Array:
    return scores + factors[h] * ((q + twice[kv]) % 3).astype(scores.dtype)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of the contract.

    Attributes:
        name: the name in tables.
        group: features of one group exclude each other, except masks, which are joined by ``&``.
        changes: fields of `Spec`; a value may be a function of the plain problem.
        trivial: whether it makes other features have no effect, so that a problem with it does not test pairs of
            others.
        cost: its time in a kernel language's interpreter, as a multiple of the plain problem's.
    """

    name: str
    group: str
    changes: Mapping[str, Any]
    trivial: bool = False
    cost: float = 1


def _features() -> Iterable[Feature]:
    yield from (Feature(name, "dtype", {"dtype": name}) for name in ("float32", "bfloat16", "float16"))
    yield Feature("runtime_dtype", "runtime_dtype", {"runtime_dtype": "bfloat16"})
    yield Feature("mixed dtypes", "runtime_dtype", {"mixed": True})
    yield Feature("GQA", "heads", {"K": lambda plain: max(1, plain.H // 2)})
    yield Feature("MQA", "heads", {"K": 1})
    yield Feature("T < S", "lengths", {"T": (1, 0.35), "S": lambda plain: (plain.T[0], 0.85)})
    yield Feature("T > S", "lengths", {"T": lambda plain: (plain.T[0], 0.85), "S": (1, 0.35)})
    yield Feature("T = 1", "lengths", {"T": (0, 1), "S": lambda plain: plain.T}, trivial=True)
    yield Feature("odd lengths", "lengths", {"T": lambda plain: (plain.T[0], 5)})
    yield Feature("D ≠ Dv", "head_dim", {"Dv": lambda plain: plain.D * 3 // 2 if plain.D < 128 else plain.D // 2})
    yield Feature("head_dim 80", "head_dim", {"D": 80})
    yield Feature("head_dim 256", "head_dim", {"D": 256}, cost=2)
    yield Feature("head dims 576/512", "head_dim", {"D": 576, "Dv": 512}, cost=4)
    yield from (Feature(name, "mask", {"mask": mask}) for name, mask in MASKS.items())
    yield from (Feature(name, "mask", {"mask": m, "traced_mask": True}) for name, m in TRACED_MASKS.items())
    yield from (Feature(name, "padding", {"padding": padding}) for name, padding in PADDINGS.items())
    yield from (Feature(f"bias [{', '.join(x if x in b else '1' for x in 'BHTS')}]", "bias", {"bias": b})
                for b in ARRAY_BIASES)  # fmt: skip
    yield Feature("float32 bias", "bias", {"bias": "HTS", "bias_dtype": "float32"})
    yield from (Feature(kind, "bias", {"bias": kind}) for kind in ("ALiBi", "RelativePosition", "ScoreFn"))
    yield Feature("rising bias", "bias", {"bias": "rising"})
    yield Feature("bias of -inf", "bias", {"bias": "-inf"})
    yield Feature("bias near finfo.min", "bias", {"bias": "lowest"})
    yield Feature("softmax_scale", "scale", {"softmax_scale": 0.4})
    yield Feature("negative scale", "scale", {"softmax_scale": -0.4})
    yield Feature("large logits", "logits", {"large": True})
    yield Feature("soft cap", "cap", {"logits_soft_cap": 1.5})
    yield Feature("sinks", "sinks", {"sinks": True})
    yield Feature("dropout", "dropout", {"dropout_prob": 0.3})
    yield Feature("logsumexp", "logsumexp", {"return_lse": True})
    yield Feature("weights", "weights", {"return_weights": True})
    yield Feature("layout BHTD", "layout", {"layout": "BHTD"})
    yield Feature("total-token layout", "layout", {"layout": "THD"}, cost=2)
    yield Feature("max logits", "max logits", {"return_max_logits": True})


FEATURES: Final[dict[str, Feature]] = {feature.name: feature for feature in _features()}


def combine(names: Iterable[str], block: int = 16, fit: Fit | None = None) -> Spec:
    """The description of the problem with all these features.

    Args:
        names: the names of the features.
        block: queries, and keys, per tile.
        fit: the plain problem, whose block is used. None: the default one, in tiles of ``block``.

    Raises:
        ValueError: a name is unknown, or two features are of one group that is not "mask".
    """
    fit = Fit(block=block) if fit is None else fit
    plain = Spec(
        block=fit.block,
        multiple=fit.multiple,
        T=(fit.tiles, 0.5),
        B=fit.B,
        H=fit.H,
        K=fit.H,
        D=fit.D,
        dtype=fit.dtype,
        own_tiles=fit.own_tiles,
    )
    changes: dict[str, Any] = {}
    groups: dict[str, str] = {}
    for name in names:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the features are {list(FEATURES)}"
            raise ValueError(f"feature {name!r} is unknown; {hint}")
        feature = FEATURES[name]
        new = dict(feature.changes)
        if feature.group == "mask" and "mask" in changes:
            new["mask"] = both_masks(changes["mask"], new["mask"])
        elif feature.group in groups:
            other = groups[feature.group]
            raise ValueError(f"features {other!r} and {name!r} exclude each other: both set the {feature.group}")
        groups[feature.group] = name
        changes |= {field: x(plain) if callable(x) and field in _DERIVED else x for field, x in new.items()}
    return dataclasses.replace(plain, **changes)
