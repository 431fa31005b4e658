"""Translation of jaxprs of scalars to Triton: masks, score functions and their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from attnops.kernels import Elementwise

if TYPE_CHECKING:
    from attnops.typing import Aval, DType, Index, JaxprLike, Leaf, PyTree

_CALLS: Final = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"]
)
_IDENTITIES: Final = frozenset(
    ["broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "optimization_barrier", "stop_gradient"]
)
TYPES: Final[Mapping[str, str]] = {
    "float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.bfloat16", "int8": "tl.int8",
    "int16": "tl.int16", "int32": "tl.int32", "int64": "tl.int64", "uint8": "tl.uint8", "uint16": "tl.uint16",
    "uint32": "tl.uint32", "uint64": "tl.uint64", "float64": "tl.float64", "bool": "tl.int1",
}  # fmt: skip


class SourceWriter:
    """The lines of a function.

    Attributes:
        lines: the lines.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._fresh = 0

    def __call__(self, *lines: str) -> None:
        """Add lines."""
        self.lines += [f"    {line}" for line in lines]

    def fresh(self) -> str:
        """An unused variable name."""
        self._fresh += 1
        return f"t{self._fresh}"


@dataclasses.dataclass(frozen=True)
class Expression:
    """An expression without operators outside parentheses, and the name of its dtype."""

    text: str
    dtype: str
    literal: bool = False

    @property
    def floating(self) -> bool:
        """Whether it is a floating-point number."""
        return bool(jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating))


def _plain(template: str) -> Callable[..., str]:
    return lambda write, params, *x: template.format(*(v.text for v in x))


def _divide(write: SourceWriter, params: JaxprLike, a: Expression, b: Expression) -> str:
    return f"{a.text} / {b.text}" if a.floating else f"{a.text} // {b.text}"  # `//` rounds towards 0


def _not(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    return f"{a.text} == 0" if a.dtype == "bool" else f"~{a.text}"


def _select(write: SourceWriter, params: JaxprLike, which: Expression, *cases: Expression) -> str:
    if which.dtype != "bool":
        raise NotImplementedError("select_n of an integer")
    return f"tl.where({which.text}, {cases[1].text}, {cases[0].text})"


def _convert(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    name = jnp.dtype(params["new_dtype"]).name
    if name == "bool":
        return f"{a.text} != 0"
    return f"{a.text}.to({TYPES[name]})"


def _named(write: SourceWriter, text: str) -> str:
    name = write.fresh()
    write(f"{name} = {text}")
    return name


def _integer_pow(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    y = int(params["y"])
    power = _power(write, a.text, abs(y)) if y else f"{a.text} * 0 + 1"
    return f"1 / ({power})" if y < 0 else power


def _power(write: SourceWriter, x: str, y: int) -> str:
    if y == 1:
        return x
    half = _power(write, x, y // 2)
    square = _named(write, f"{half} * {half}")
    return f"{square} * {x}" if y % 2 else square


def tanh(write: SourceWriter, x: str) -> str:
    """The hyperbolic tangent of float32; near 0, where the exponentials would cancel, by its series."""
    e = _named(write, f"tl.exp(-2.0 * tl.abs({x}))")
    size = _named(write, f"(1.0 - {e}) / (1.0 + {e})")
    square = _named(write, f"{x} * {x}")
    terms = f"0.3333333333 - {square} * (0.1333333333 - {square} * 0.05396825397)"
    series = _named(write, f"{x} * (1.0 - {square} * ({terms}))")
    far = _named(write, f"tl.where({x} < 0, -{size}, {size})")
    return f"tl.where(tl.abs({x}) < 0.15, {series}, {far})"


def _tanh(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    return tanh(write, a.text)


def _log1p(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    u = _named(write, f"1.0 + {a.text}")
    # The rounding error of 1 + x is divided out (Kahan).
    close = _named(write, f"tl.where({u} == 1.0, 1.0, {u} - 1.0)")
    far = f"({u} == 1.0) | ({u} == float('inf'))"
    return f"tl.where({far}, {a.text} + tl.log({u}) * ({u} == float('inf')), tl.log({u}) * ({a.text} / {close}))"


def _expm1(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    t = _named(write, f"tl.exp({a.text})")
    small = _named(write, f"tl.abs({a.text}) < 0.01")
    series = f"{a.text} * (1.0 + {a.text} * (0.5 + {a.text} * (0.16666666666 + {a.text} * 0.0416666666)))"
    return f"tl.where({small}, {series}, {t} - 1.0)"


def _round(write: SourceWriter, params: JaxprLike, a: Expression) -> str:
    down = _named(write, f"tl.floor({a.text})")
    fraction = _named(write, f"{a.text} - {down}")
    if "EVEN" in str(params["rounding_method"]) or str(params["rounding_method"]) == "1":
        up = f"({fraction} > 0.5) | (({fraction} == 0.5) & ({down} - 2.0 * tl.floor({down} * 0.5) == 1.0))"
    else:
        up = f"({fraction} > 0.5) | (({fraction} == 0.5) & ({a.text} >= 0.0))"
    return f"tl.where({up}, {down} + 1.0, {down})"


def _pow(write: SourceWriter, params: JaxprLike, a: Expression, b: Expression) -> str:
    if not b.floating:
        b = Expression(
            f"({float(b.text.strip('()'))})" if b.literal else f"{b.text}.to(tl.float32)", "float32", b.literal
        )
    size = _named(write, f"tl.exp2({b.text} * tl.log2(tl.abs({a.text})))")
    is_integer = f"{b.text} == tl.floor({b.text})"
    odd = f"{b.text} - 2.0 * tl.floor({b.text} * 0.5) == 1.0"
    below = _named(write, f"tl.where({is_integer}, tl.where({odd}, -{size}, {size}), float('nan'))")
    return f"tl.where({b.text} == 0.0, 1.0, tl.where({a.text} < 0.0, {below}, {size}))"


_TABLE: Final[Mapping[str, Callable[..., str]]] = {
    "add": _plain("{} + {}"), "add_any": _plain("{} + {}"), "sub": _plain("{} - {}"), "mul": _plain("{} * {}"),
    "neg": _plain("-{}"), "div": _divide, "rem": _plain("{} % {}"), "max": _plain("tl.maximum({}, {})"),
    "min": _plain("tl.minimum({}, {})"), "abs": _plain("tl.abs({})"), "eq": _plain("{} == {}"),
    "ne": _plain("{} != {}"), "lt": _plain("{} < {}"), "le": _plain("{} <= {}"), "gt": _plain("{} > {}"),
    "ge": _plain("{} >= {}"), "and": _plain("{} & {}"), "or": _plain("{} | {}"), "xor": _plain("{} ^ {}"),
    "not": _not, "select_n": _select, "convert_element_type": _convert,
    "clamp": _plain("tl.minimum(tl.maximum({1}, {0}), {2})"), "floor": _plain("tl.floor({})"),
    "ceil": _plain("tl.ceil({})"), "round": _round, "exp": _plain("tl.exp({})"), "exp2": _plain("tl.exp2({})"),
    "expm1": _expm1, "log": _plain("tl.log({})"), "log1p": _log1p, "sqrt": _plain("tl.sqrt({})"),
    "rsqrt": _plain("tl.rsqrt({})"), "sin": _plain("tl.sin({})"), "cos": _plain("tl.cos({})"), "tanh": _tanh,
    "logistic": _plain("1.0 / (1.0 + tl.exp(-{}))"), "erf": _plain("tl.erf({})"), "integer_pow": _integer_pow,
    "square": _plain("{0} * {0}"), "one_minus_square": _plain("1.0 - {0} * {0}"), "pow": _pow,
    "sign": _plain("tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))"),
}  # fmt: skip
# Primitives that Triton computes only in float32.
_FLOAT32: Final = frozenset(
    ["floor", "ceil", "round", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh",
     "logistic", "erf", "pow"]
)  # fmt: skip
# Primitives whose derivatives may be infinite, or NaN.
_SINGULAR: Final = frozenset(["div", "integer_pow", "log", "log1p", "pow", "rsqrt", "sqrt"])
# The primitives of a `MaskFn` or a `ScoreFn` that have a translation.
PRIMITIVES: Final = frozenset(_TABLE) - {"add_any"} | {"stop_gradient"}


def translate(write: SourceWriter, closed: JaxprLike, inputs: Sequence[str]) -> list[str]:
    """Write a jaxpr of scalars. Returns its results, as expressions without operators outside parentheses.

    Args:
        write: the kernel's lines.
        closed: a closed jaxpr of scalars.
        inputs: expressions whose shapes broadcast with one another.

    Raises:
        NotImplementedError: a primitive has no translation.
    """
    constants = [_literal(value, jnp.result_type(value)) for value in closed.consts]
    given = [Expression(x, v.aval.dtype.name) for x, v in zip(inputs, closed.jaxpr.invars, strict=True)]
    return [value.text for value in _inline(write, closed.jaxpr, constants, given)]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a mask or of a bias, an array [B or 1, H or 1, T or S or 1]."""

    by_batch: bool
    by_head: bool
    axis: str  # "q" if it varies by query, "kv" by key, and "" by neither
    dtype: Any  # Triton's


def describe_values(function: Elementwise | None, of_tokens: bool = False) -> tuple[Value, ...]:
    """The values of a mask or of a bias. If ``of_tokens``, it is left out whether they vary by batch or head."""
    import triton.language as tl

    if function is None:
        return ()
    dtypes = [tl.int1 if x == jnp.bool_ else getattr(tl, jnp.dtype(x).name) for x in function.dtypes]
    leading = [("b" in axes and not of_tokens, "h" in axes and not of_tokens) for axes in function.values]
    axes_of_tokens = [next((x for x in ("q", "kv") if x in axes), "") for axes in function.values]
    return tuple(Value(*x, axis, dtype) for x, axis, dtype in zip(leading, axes_of_tokens, dtypes, strict=True))


@functools.lru_cache(maxsize=1024)
def mask_function(mask: Elementwise, arrays: int, gluon: bool = False) -> Any:
    """A mask as a function in Triton's language, or in Gluon, of b, h, q, kv, its values, and ``arrays`` booleans."""
    values = [*_values(mask), *(f"dense[{i}]" for i in range(arrays))]
    write = SourceWriter()
    (ok,) = translate(write, traced(mask, arrays), ["0.0", "b", "h", "q", "kv", *values])
    return _function(write, "mask(b, h, q, kv, values, dense)", ok, gluon)


@functools.lru_cache(maxsize=1024)
def score_function(bias: Elementwise | None, cap: float | None, gluon: bool = False) -> Any:
    """Soft cap and bias as a function in Triton's language, or in Gluon; None for neither.

    The function is of scores, b, h, q, kv and the bias's values. It returns the scores, the scores without bias, and
    the hyperbolic tangent of the soft cap.
    """
    if bias is None and cap is None:
        return None
    write, s = SourceWriter(), "unbiased"
    write("curve = s", "unbiased = s")
    if cap is not None:
        write(f"x = s * {number(1 / float(cap))}")
        write(f"curve = {tanh(write, 'x')}", f"unbiased = {number(float(cap))} * curve")
    if bias is not None:
        (s,) = translate(write, traced(bias, 0), ["unbiased", "b", "h", "q", "kv", *_values(bias)])
    return _function(write, "score(s, b, h, q, kv, values)", f"{s}, unbiased, curve", gluon)


@functools.lru_cache(maxsize=1024)
def score_vjp_function(bias: Elementwise) -> Any:
    """The derivative of a bias as a function in Triton's language of scores without bias, b, h, q, kv, the bias's
    values, and the gradients of the scores.

    It returns the gradients of its first argument, and of the values that `derivative` names.
    """
    write = SourceWriter()
    given = ["s", "b", "h", "q", "kv", *_values(bias), "ds"]
    results = translate(write, derivative(bias)[0], given)
    if bias.primitives & _SINGULAR:
        # Of masked scores and of those beyond the last token, ds is 0, and 0 · inf is NaN.
        results = [f"tl.where(ds == 0.0, 0.0, {x})" for x in results]
    return _function(write, "score_vjp(s, b, h, q, kv, values, ds)", "".join(f"{x}, " for x in results), False)


def _values(function: Elementwise) -> list[str]:
    return [f"values[{i}]" for i in range(len(function.values))]


def _function(write: SourceWriter, head: str, result: str, gluon: bool) -> Any:
    from attnops_triton.language.compat import jitted

    return jitted(head.partition("(")[0], "\n".join([f"def {head}:", *write.lines, f"    return {result}", ""]), gluon)


def number(x: float) -> str:
    """A number as Triton source."""
    if isinstance(x, float) and x - x != 0:
        return f'float("{x}")'
    return repr(x)


def _literal(value: Leaf, dtype: DType) -> Expression:
    scalar = np.asarray(value, dtype)
    if scalar.ndim:
        raise NotImplementedError(f"a constant of shape {scalar.shape}")
    plain = bool(scalar) if dtype == jnp.bool_ else int(scalar) if jnp.issubdtype(dtype, jnp.integer) else float(scalar)
    text = number(plain)
    return Expression(f"({text})" if text.startswith("-") else text, jnp.dtype(dtype).name, True)


def _inline(
    write: SourceWriter, jaxpr: JaxprLike, constants: list[Expression], inputs: list[Expression]
) -> list[Expression]:
    names = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: JaxprLike) -> Expression:
        # Typed as an abstract value, which has no dtype.
        return _literal(atom.val, atom.aval.dtype) if isinstance(atom, jex.Literal) else names[atom]  # type: ignore[attr-defined]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in _CALLS and body is not None:
            closed = [_literal(value, jnp.result_type(value)) for value in getattr(body, "consts", [])]
            results = _inline(write, getattr(body, "jaxpr", body), closed, inputs)
        elif name in _IDENTITIES or (name == "reduce_sum" and not eqn.params["axes"]):
            results = inputs
        elif name in _TABLE:
            # A literal is an int32 or a float32 in Triton, and many functions exist only for float32.
            inputs = [_spread(write, v) if v.literal and v.dtype.startswith("uint") else v for v in inputs]
            dtypes = {atom.aval.dtype.name for atom in (*eqn.invars, eqn.outvars[0])}  # type: ignore[attr-defined]
            # Triton's interpreter computes bfloat16 as if it were integers; rounding a float32 result is equivalent.
            narrow = "bfloat16" in dtypes or (name in _FLOAT32 and eqn.outvars[0].aval.dtype.itemsize == 2)
            inputs = [_widened(v, name == "convert_element_type") for v in inputs] if narrow else inputs
            if inputs and all(value.literal for value in inputs):
                inputs = [_spread(write, value) for value in inputs]
            text = _named(write, _TABLE[name](write, eqn.params, *inputs))
            text = _named(write, f"{text}.to({TYPES[eqn.outvars[0].aval.dtype.name]})") if narrow else text
            results = [Expression(text, eqn.outvars[0].aval.dtype.name)]
        else:
            raise NotImplementedError(f"{name} has no translation to Triton")
        names |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _widened(value: Expression, integers_too: bool = False) -> Expression:
    """A 16-bit number as float32."""
    is_narrow = not value.literal and (value.floating or integers_too)
    return Expression(f"{value.text}.to(tl.float32)", "float32") if is_narrow else value


def _spread(write: SourceWriter, value: Expression) -> Expression:
    """A literal as a tensor, which methods and functions need."""
    return Expression(_named(write, f"tl.full([1, 1], {value.text}, {TYPES[value.dtype]})"), value.dtype)


def traced(function: Elementwise, given: int) -> JaxprLike:
    """The jaxpr of ``function.apply`` on scalars: scores, b, h, q, kv, its values, and ``given`` booleans."""
    n = len(function.values)
    return jax.make_jaxpr(lambda s, b, h, q, kv, *arrays: function.apply(s, b, h, q, kv, arrays[:n], arrays[n:]))(
        *_scalars(function, given)
    )


def differentiable(function: Elementwise) -> list[int]:
    """The indices of values that are floating-point numbers."""
    return [i for i, dtype in enumerate(function.dtypes) if jnp.issubdtype(dtype, jnp.floating)]


def derivative(function: Elementwise) -> tuple[JaxprLike, list[int]]:
    """The jaxpr of the derivative of a bias, and the indices of the values whose gradients it computes.

    Its inputs are those of `traced` and the gradient of the result; its results are the gradients of the scores and of
    these values.
    """
    wanted = differentiable(function)

    def pulled_back(s: jax.Array, b: Index, h: Index, q: Index, kv: Index, *values_and_d: Leaf) -> PyTree:
        *values, d = values_and_d

        def changed(s: jax.Array, some: list[Leaf]) -> PyTree:
            merged = list(values)
            for i, x in zip(wanted, some, strict=True):
                merged[i] = x
            return function.apply(s, b, h, q, kv, merged)

        return jax.vjp(changed, s, [values[i] for i in wanted])[1](d)

    return jax.make_jaxpr(pulled_back)(*_scalars(function, 0), jax.ShapeDtypeStruct((), jnp.float32)), wanted


def _scalars(function: Elementwise, given: int) -> list[Aval]:
    dtypes = [jnp.float32, *[jnp.int32] * 4, *function.dtypes, *[jnp.bool_] * given]
    return [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
