"""TokenLayout: how key and value of a token lie in the arrays of a `Store`; TokenOptions: what a cache is made with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Required, Self, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attnops.dispatch.vocabulary import hint
from attnops_caches.codec import Quantized
from attnops_caches.integers import check_size

if TYPE_CHECKING:
    from attnops.typing import DType


class TokenOptions(TypedDict, total=False):
    """What every storage is created with. All but the first two may be left out, or be None.

    Attributes:
        kv_heads: K.
        head_dim: D, of keys.
        value_head_dim: Dv, of values; None for D.
        dtype: the dtype of keys and values as they are appended and read, and of queries. bfloat16 if left out.
        codec: a `Quantized`, how tokens are stored; None: as they are.
        latent: for multi-head latent attention (arXiv:2405.04434): the value is the key's first ``latent`` features.
        key_scale: with scales by tensor, float32 []; by head, [K]; [L] or [L, K] for layers that differ.
        value_scale: the same of the values.
        layers: L, for a layer axis in front of the arrays of tokens; None for none.
        width: W, the features of a token in one array: its key, zeros, and its value last; of latent content the
            key and zeros. If left out, keys and values are two arrays, [B, K, S, D] and [B, K, S, Dv].
    """

    kv_heads: Required[int]
    head_dim: Required[int]
    value_head_dim: int | None
    dtype: DType
    codec: Quantized | None
    latent: int | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    layers: int | None
    width: int | None


@dataclasses.dataclass(frozen=True)
class TokenLayout:
    """How a token of one kv head is stored; static.

    Attributes:
        content: ``"separate"``: the key [D] and the value [Dv] are in arrays of their own. ``"joined"``: one array has
            the key first, then zeros, and the value last. ``"latent"``: the key, then zeros; the value is the first Dv
            features of the key.
        head_dim: D, of keys.
        value_head_dim: Dv, of values.
        width: W, the features of the array of keys.
        dtype: the dtype of keys and values as they are appended and read.
        codec: how they are stored; None: as they are.
    """

    content: Literal["separate", "joined", "latent"]
    head_dim: int
    value_head_dim: int
    width: int
    dtype: DType
    codec: Quantized | None

    @property
    def stored_dtype(self) -> DType:
        """The dtype of stored elements; arrays hold the bits of narrow floats, see `attnops_caches.bits`."""
        return jnp.dtype(self.dtype) if self.codec is None else self.codec.stored_dtype

    @property
    def has_token_scales(self) -> bool:
        """Whether each token of each head has scales of its own."""
        return self.codec is not None and self.codec.scales == "token_head"

    def elements(self, features: int) -> int:
        """How many elements of an array store so many features."""
        return features if self.codec is None else features // self.codec.per_element

    def key_of(self, x: jax.Array) -> jax.Array:
        """The keys of the array of keys, or of a part of it; encoded as they are."""
        return x[..., : self.elements(self.head_dim)]

    def value_of(self, x: jax.Array, value: jax.Array | None) -> jax.Array:
        """The values of the arrays of keys and of values, or of parts of them; encoded as they are."""
        return x[..., self.elements(self.width - self.value_head_dim) :] if value is None else value

    def to_json(self) -> dict[str, Any]:
        """The fields in JSON's terms."""
        return dataclasses.asdict(self) | {"dtype": jnp.dtype(self.dtype).name}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        codec = fields["codec"] and Quantized(**fields["codec"])
        return cls(**fields | {"dtype": jnp.dtype(fields["dtype"]), "codec": codec})


def layout_of(tokens: TokenOptions, joins: bool = False) -> tuple[TokenLayout, int, tuple[int, ...]]:
    """The layout, K, and (L,), or () without a layer axis, of a cache that is created with these options.

    If ``joins``, key and value are in one array also without a ``width``.

    Raises:
        TypeError: an option that there is not, or one that is missing; a size that is not an int.
        ValueError: sizes, a dtype or a codec that fit no cache.
    """
    known = sorted(TokenOptions.__annotations__)
    for name in tokens:
        if name not in known:
            advice = hint(name, known)
            raise TypeError(f"a cache has no option {name!r}; it has {known}{advice and f'; {advice}'}")
    given: Any = {name: x for name, x in tokens.items() if x is not None}
    for name in ("kv_heads", "head_dim"):
        if name not in given:
            raise TypeError(f"{name} is missing: a cache is created with kv_heads=K and head_dim=D at least")
    sizes = {x: check_size(x, n) for x, n in given.items() if x not in ("dtype", "codec", "key_scale", "value_scale")}
    D, latent, width, codec = sizes["head_dim"], sizes.get("latent"), sizes.get("width"), given.get("codec")
    dtype = jnp.dtype(given.get("dtype", jnp.bfloat16))
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize not in (2, 4):
        raise ValueError(
            f"dtype={dtype.name} must be float32, bfloat16 or float16; for narrower numbers give one of these and "
            f"codec=Quantized('int8')"
        )
    if codec is not None and not isinstance(codec, Quantized):
        raise ValueError(f"codec={codec!r} must be None or an attnops_caches.Quantized")
    Dv = sizes.get("value_head_dim", latent or D)
    if latent is not None and (latent > D or Dv != latent):
        raise ValueError(
            f"latent={latent} must be at most head_dim={D}, and value_head_dim={given.get('value_head_dim')} None or "
            f"equal to it: the value is the first latent features of the key"
        )
    least = D + (0 if latent else Dv)
    if width is not None and width < least:
        what = "the features of a latent" if latent else "the features of key and value together"
        raise ValueError(f"width={width} must be at least {least}, {what}; or None for no padding")
    for name, size in {"head_dim": D, "value_head_dim": 0 if latent else Dv, "width": width or 0}.items():
        if codec is not None and size % codec.per_element:
            raise ValueError(
                f"{name}={size} is odd, but codec={str(codec)!r} stores two features in a byte: give an even one, or "
                f"an 8-bit codec"
            )
    is_separate = not (latent or width or joins)
    content: Any = "latent" if latent else "separate" if is_separate else "joined"
    layout = TokenLayout(content, D, Dv, D if is_separate else width or least, dtype, codec)
    return layout, sizes["kv_heads"], (sizes["layers"],) if "layers" in sizes else ()
