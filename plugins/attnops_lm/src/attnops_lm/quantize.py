"""Linear layers with weights in 8 or 4 bits, and products of quantised operands, by qwix.

Quantisation is symmetric: an int8 value and a float32 scale for each output, the largest absolute value / 127.5. With
groups, each group of consecutive inputs of an output has a scale.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from attnops_lm.layers import Linear
from attnops_lm.params import bytes_of, with_modules

if TYPE_CHECKING:
    from attnops_lm.model import Decoder

Model = TypeVar("Model", bound="Decoder")
DotGeneral = Callable[..., jax.Array]
Numbers = Any  # jax.lax.DotDimensionNumbers
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What is quantised, and to how many bits.

    Attributes:
        bits: bits per weight, 2 to 8. More than 4 are stored in int8 arrays, 4 and fewer in int4 arrays.
        activations: whether inputs are quantised too, in each call, with a scale per token, so that products are of
            integers.
        group: consecutive inputs that share a scale, such as 32; None: all inputs of an output do.
        pattern: a regular expression of the layers' paths; the head is left as it is.

    Raises:
        ValueError: bits is not an int from 2 to 8, or group is below 1, or activations are to be quantised with groups.
    """

    bits: int = 8
    activations: bool = False
    group: int | None = None
    pattern: str = r"^layers\..*\.(q|k|v|o|gate|up|down|qkvz|inputs)(\.base_module)?$"

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if self.group is not None and (self.group < 1 or self.activations):
            raise ValueError(
                f"group={self.group} must be at least 1, and activations={self.activations} must be False with groups: "
                f"products of integers have one scale for all inputs"
            )


class QuantizedWeight(nnx.Variable[jax.Array]):
    """Part of a quantised weight. Not an `nnx.Param`: it has no gradient."""


class QuantizedLinear(nnx.Module):
    """A `Linear` with a quantised kernel: [..., inputs] to [..., outputs]."""

    def __init__(self, linear: Linear, config: QuantizationConfig) -> None:
        self.inputs, self.outputs, self.activations = linear.inputs, linear.outputs, config.activations
        self.qtype = f"int{config.bits}"
        kernel = linear.kernel[...].astype(jnp.float32)
        tiles = {} if config.group is None else {0: config.group}
        weight = _qwix().quantize(kernel, self.qtype, channelwise_axes=(1,), tiled_axes=tiles)
        self.qvalue, self.scale = QuantizedWeight(weight.qvalue), QuantizedWeight(weight.scale)
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        qvalue, scale = self.qvalue[...], self.scale[...]
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        if self.activations:
            qwix = _qwix()
            tokens = qwix.quantize(x.astype(jnp.float32), self.qtype, channelwise_axes=range(x.ndim - 1))
            out = qwix.dot_general(tokens, qwix.QArray(qvalue, scale, qtype=self.qtype), numbers)
        else:
            kernel = qvalue.astype(x.dtype)
            if (groups := scale.shape[0]) > 1:
                kernel = qvalue.reshape(groups, -1, self.outputs).astype(jnp.float32) * scale[:, None]
                kernel = kernel.reshape(qvalue.shape).astype(x.dtype)
            precision = "highest" if x.dtype == jnp.float32 else None
            out = jax.lax.dot_general(x, kernel, numbers, precision=precision, preferred_element_type=jnp.float32)
            if groups == 1:
                out = out * scale[0]  # an output's scale is a factor of its sum
        out = out.astype(x.dtype)
        return out if self.bias is None else out + self.bias[...].astype(x.dtype)


def quantize(
    model: Model,
    quantization_config: QuantizationConfig | None = None,
    quantize_tensors: bool = True,
    verbose: bool | None = None,
) -> Model:
    """A copy with quantised linear layers. The embedding, the head, norms and mixtures of experts are left as they are.

    Args:
        model: the model, which is not changed.
        quantization_config: what is quantised; None: weights only, to 8 bits.
        quantize_tensors: True: weights are stored as integers, to run. False: they stay as they are, and each call
            quantises weights and inputs, with gradients as if it did not, for quantisation-aware training.
        verbose: whether the memory before and after is logged; None: not.

    Raises:
        ModuleNotFoundError: qwix is not installed.
        ValueError: the pattern matches no linear layer, one that is quantised already, or one whose inputs are no
            multiple of the group; or groups, with weights that stay.
    """
    config = QuantizationConfig() if quantization_config is None else quantization_config
    pattern = re.compile(config.pattern)
    if config.group is not None and not quantize_tensors:
        raise ValueError(f"group={config.group} must be None with quantize_tensors=False: inputs are quantised too")
    count = 0

    def quantized(path: str, layer: Linear | QuantizedLinear) -> nnx.Module | None:
        nonlocal count
        if not pattern.search(path):
            return None
        if isinstance(layer, QuantizedLinear):
            raise ValueError(
                f"{path} is {layer.qtype} already, and would be rounded twice; quantise the original model"
            )
        if config.group is not None and layer.inputs % config.group:
            raise ValueError(f"{path} has {layer.inputs} inputs, which must be a multiple of group={config.group}")
        count += 1
        if quantize_tensors:
            return QuantizedLinear(layer, config)
        layer.dot_general = get_dot_general_by_bits(config.bits, "serve")["dot_general_cls"]()
        return None

    result = with_modules(model, (Linear, QuantizedLinear), quantized)
    if not count:
        raise ValueError(
            f"pattern={config.pattern!r} matches no linear layer; a path is, for example, layers.0.attention.q"
        )
    if verbose:
        _log.warning("%d layers quantised, %d bytes before, %d after", count, bytes_of(model), bytes_of(result))
    return result


def get_dot_general_by_bits(
    bits: int | None = None, mode: Literal["train", "serve", "eval", "convert"] = "train"
) -> dict[str, Callable[[], DotGeneral]]:
    """``{"dot_general_cls": f}``, where ``f()`` is a `jax.lax.dot_general` that quantises its operands; {} for bits
    None.

    ``f`` is an argument of `flax.linen.Dense`; ``f()`` is an argument of `flax.nnx.Linear`, and may be set as
    `Linear.dot_general`. Each operand has a scale per row or column of the product.

    Args:
        bits: 2 to 8, of both operands.
        mode: "train": the two products of the backward pass are quantised too; "serve" and "eval": they are not.

    Raises:
        ValueError: the mode is "convert", which would store weights, or is unknown.
    """
    if mode == "convert":
        raise ValueError("mode='convert' stores weights, which a dot_general can't; use model.quantize()")
    if mode not in ("train", "serve", "eval"):
        raise ValueError(f"mode={mode!r} must be train, serve or eval")
    if bits is None:
        return {}
    _check_bits(bits)
    return {"dot_general_cls": functools.partial(_make_dot_general, bits, bits if mode == "train" else None)}


@functools.cache
def _make_dot_general(bits: int, backward_bits: int | None) -> DotGeneral:
    def dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Numbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        del precision, out_sharding  # products of integers are exact
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers
        lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_sum, *lhs_batch)]
        rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_sum, *rhs_batch)]
        sizes = tuple(lhs.shape[i] for i in (*lhs_batch, *lhs_free)) + tuple(rhs.shape[i] for i in rhs_free)
        batch = _size(lhs, lhs_batch)
        a = lhs.transpose(*lhs_batch, *lhs_free, *lhs_sum).reshape(batch, _size(lhs, lhs_free), _size(lhs, lhs_sum))
        b = rhs.transpose(*rhs_batch, *rhs_sum, *rhs_free).reshape(batch, _size(rhs, rhs_sum), _size(rhs, rhs_free))
        out = _product(a, b, bits, backward_bits).reshape(sizes)
        return out.astype(preferred_element_type or jnp.result_type(lhs, rhs))

    return dot_general


def _size(x: jax.Array, axes: Any) -> int:
    size = 1
    for axis in axes:
        size *= x.shape[axis]
    return size


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(a: jax.Array, b: jax.Array, bits: int | None, backward_bits: int | None) -> jax.Array:
    """[n, M, K] and [n, K, N] to float32 [n, M, N]."""
    numbers = (((2,), (1,)), ((0,), (0,)))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if bits is None:
        return jax.lax.dot_general(a, b, numbers, precision="highest")
    qwix = _qwix()
    rows = qwix.quantize(a, f"int{bits}", channelwise_axes=(0, 1))
    columns = qwix.quantize(b, f"int{bits}", channelwise_axes=(0, 2))
    out: jax.Array = qwix.dot_general(rows, columns, numbers)
    return out


def _forward(a: jax.Array, b: jax.Array, bits: int | None, backward_bits: int | None) -> Any:
    return _product(a, b, bits, backward_bits), (a, b)


def _backward(bits: int | None, backward_bits: int | None, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    d_a = _product(g, b.mT, backward_bits, None).astype(a.dtype)
    d_b = _product(a.mT, g, backward_bits, None).astype(b.dtype)
    return d_a, d_b


_product.defvjp(_forward, _backward)


def _check_bits(bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits={bits!r} must be an int, 2 to 8")


def _qwix() -> Any:
    try:
        import qwix
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("quantisation needs qwix; pip install qwix, or attnops-lm[quantize]") from error
    return qwix
