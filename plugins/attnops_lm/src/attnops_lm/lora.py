"""Low-rank adaptation of linear layers (Hu et al. 2021, arXiv:2106.09685), by `flax.nnx.LoRA`.

A layer ``x @ kernel`` becomes ``x @ kernel + x @ lora_a @ lora_b``, lora_a [inputs, rank] and lora_b [rank, outputs];
lora_b begins as zeros. To train only these, differentiate with respect to `flax.nnx.LoRAParam`.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from attnops_lm.layers import Linear
from attnops_lm.params import components, merged, with_modules
from attnops_lm.quantize import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnops_lm.model import Decoder

Model = TypeVar("Model", bound="Decoder")
_log = logging.getLogger(__name__)


def apply(
    model: Model, lora_rank: int, lora_pattern: str | None = None, verbose: bool = False, rngs: nnx.Rngs | None = None
) -> Model:
    """A copy with low-rank matrices added to linear layers; before they are trained, the output does not change.

    Args:
        model: the model, which is not changed; the copy shares its arrays.
        lora_rank: 1 or more.
        lora_pattern: a regular expression of the layers' paths, such as ``attention.(q|v)$``; None: all linear layers
            except the head.
        verbose: whether each layer is logged.
        rngs: the random numbers of lora_a; None: seed 0.

    Raises:
        ValueError: a rank below 1, a model that has LoRA already, or a pattern that no layer matches.
    """
    if isinstance(lora_rank, bool) or not isinstance(lora_rank, int) or lora_rank < 1:
        raise ValueError(f"lora_rank={lora_rank!r} must be an int of 1 or more")
    if has_lora(model):
        raise ValueError("the model has LoRA layers already; call unwrap_lora_to_layers() first")
    rngs = nnx.Rngs(0) if rngs is None else rngs
    pattern = re.compile(r"^layers\." if lora_pattern is None else lora_pattern)

    def wrap(path: str, layer: Linear | QuantizedLinear) -> nnx.Module | None:
        if not pattern.search(path):
            return None
        if verbose:
            _log.warning("%s: LoRA of rank %d on [%d, %d]", path, lora_rank, layer.inputs, layer.outputs)
        return nnx.LoRA(
            layer.inputs, lora_rank, layer.outputs, base_module=layer, dtype=model.dtype, param_dtype=model.dtype,
            rngs=rngs,
        )  # fmt: skip

    result = with_modules(model, (Linear, QuantizedLinear), wrap)
    if not has_lora(result):
        raise ValueError(
            f"lora_pattern={lora_pattern!r} matches no linear layer; a path is, for example, layers.0.attention.q"
        )
    return result


def split(model: nnx.Module) -> dict[str, Any]:
    """Only the low-rank matrices, in nested dicts; empty for a model without LoRA."""
    return components(nnx.to_pure_dict(nnx.state(model, nnx.Param)))["lora_params"]


def merge(model: Model, pytree: Mapping[str, Any]) -> Model:
    """A copy with these low-rank matrices, nested dicts as `split` returns them."""
    return merged(model, pytree, nnx.LoRAParam)


def unwrap(model: Model, verbose: bool = False) -> Model:
    """A copy whose kernels have the low-rank products added, without LoRA layers.

    Args:
        model: the model, which is not changed.
        verbose: whether each layer is logged.

    Raises:
        ValueError: a layer is quantised: its kernel would round the product.
    """

    def unwrapped(path: str, layer: nnx.LoRA) -> nnx.Module:
        base: Any = layer.base_module
        if isinstance(base, QuantizedLinear):
            raise ValueError(f"{path} is quantised, and its LoRA would be rounded; unwrap before quantize()")
        kernel = base.kernel.get_value()
        wide = (x[...].astype(jnp.float32) for x in (layer.lora_a, layer.lora_b))
        product = jnp.matmul(*wide, precision="highest")
        base.kernel.set_value((kernel.astype(jnp.float32) + product).astype(kernel.dtype))
        if verbose:
            _log.warning("%s: LoRA of rank %d added to the kernel", path, layer.lora_a.shape[1])
        return base

    return with_modules(model, nnx.LoRA, unwrapped)


def has_lora(model: nnx.Module) -> bool:
    """Whether any layer has low-rank matrices."""
    return any(isinstance(module, nnx.LoRA) for _, module in nnx.iter_modules(model))
