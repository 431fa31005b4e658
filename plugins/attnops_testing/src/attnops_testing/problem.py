"""A problem: the arguments of one call, the oracle's results for it, and the comparison with an operation's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import ALiBi, Bias, RelativePosition, ScoreFn
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.request import Request
from attnops.dropout import dropout_seed
from attnops.errors import Reason
from attnops.masks import Mask
from attnops.output import OperationOutput
from attnops_testing import oracle, total
from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close, tolerance

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

    from attnops.typing import Function, PyTree

# On a CPU most of a small problem's time is spent in LLVM's optimiser, which does not change what is tested.
FAST_COMPILE: Final = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of attention.

    Attributes:
        query: [B, T, H, D], whatever the metadata's layout.
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        options: the contract's options, as the caller gives them.
        metadata: the operation's metadata.
        seed: the seed of the random cotangents.
        visible: what the mask allows, booleans that broadcast to [B, H, T, S], computed independently of the mask.
            None: the mask computes them.
        poison: by name ("query", "key", "value"), booleans [B, length]: the tokens that are NaN in every head when the
            operation gets them. The mask must hide them; the oracle gets the numbers in the arrays above.
        score_pattern: [T, S], not negative: a `ScoreFn` adds its first argument, [H], times this pattern to the scores.
        traced_mask: the mask's arrays are arguments of the compiled program, not constants.
    """

    query: oracle.Array
    key: oracle.Array
    value: oracle.Array
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)
    seed: int = 0
    visible: Mask | ArrayLike | None = None
    poison: Mapping[str, ArrayLike] = dataclasses.field(default_factory=dict)
    score_pattern: oracle.Array | None = None
    traced_mask: bool = False

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the computation: the query's, or the metadata's ``runtime_dtype``."""
        return self.query.dtype if self.metadata.runtime_dtype is None else self.metadata.runtime_dtype

    @property
    def qkv(self) -> tuple[oracle.Array, ...]:
        """Query, key and value in the dtype of the computation, for the oracle."""
        cast = self.metadata.runtime_dtype
        return tuple(x if cast is None else x.astype(cast) for x in (self.query, self.key, self.value))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        B, T, H, _ = self.query.shape
        return B, H, T, self.key.shape[1]

    @functools.cached_property
    def inputs(self) -> dict[str, jax.Array]:
        """The arrays that have a gradient, by name."""
        given = {"query": self.query, "key": self.key, "value": self.value} | {
            name: self.options[name] for name in ("bias", "sinks") if self.options.get(name) is not None
        }
        for name, hidden in self.poison.items():
            given[name] = np.where(
                np.asarray(hidden)[:, :, None, None], np.asarray(np.nan, given[name].dtype), given[name]
            )
        return {name: jax.tree.map(jnp.asarray, x) for name, x in given.items()}

    @functools.cached_property
    def oracle_options(self) -> dict[str, Any]:
        """The options for the oracle: masks and dropout as boolean arrays."""
        options = {
            name: value
            for name, value in self.options.items()
            if name in ("bias", "softmax_scale", "logits_soft_cap", "sinks") and value is not None
        }
        for name in ("softmax_scale", "logits_soft_cap"):
            if (default := getattr(self.metadata, name)) is not None:
                options.setdefault(name, default)
        if isinstance(options.get("bias"), Bias):
            options["bias"] = self._structured("")
        mask = self.options.get("mask")
        if mask is not None:
            known = mask if self.visible is None else self.visible
            options["mask"] = np.asarray(known.dense(*self.shape) if isinstance(known, Mask) else known)
        if self.options.get("dropout_key") is not None and self.metadata.dropout_prob:
            words = dropout_seed(self.options["dropout_key"])[:2]  # the other words are 0 without a shard
            prob = options["dropout_prob"] = self.metadata.dropout_prob
            THD = self.metadata.layout == "THD"
            keep = oracle.dropout_keep(words, prob, total.tokens_of(self.shape) if THD else self.shape)
            options["keep"] = total.kept(keep, self.shape) if THD else keep
        return options

    @functools.cached_property
    def cotangents(self) -> dict[str, Any]:
        """Random cotangents of every requested output, in the outputs' dtypes."""
        rng = np.random.default_rng(self.seed)
        B, H, T, S = self.shape
        out = {"attention_outputs": rng.normal(size=(B, T, H, self.value.shape[-1])).astype(self.dtype)}
        if self.options.get("return_lse"):
            out["logsumexp"] = rng.normal(size=(B, H, T)).astype(np.float32)
        if self.options.get("return_weights"):
            out["attention_weights"] = rng.normal(size=(B, H, T, S)).astype(self.dtype)
        if self.options.get("return_max_logits"):  # without effect
            out["max_logits"] = rng.normal(size=(B, H, T)).astype(np.float32)
        return out

    def call(
        self, operation: OperationImpl, inputs: dict[str, jax.Array], mask: Mask | ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Run the call with these values for its inputs. Returns the outputs by name, without None, in the layout
        "BTHD".

        Args:
            operation: the operation that is called.
            inputs: values in place of those of `inputs`.
            mask: a mask in place of the options'.
        """
        qkv, options = self._arguments(inputs, mask)
        result: OperationOutput = operation(*qkv, **options)
        named = {name: value for name, value in result.to_dict().items() if value is not None}
        if self.metadata.layout == "THD":
            return total.outputs(named, self.shape)
        if self.metadata.layout == "BHTD":
            named["attention_outputs"] = named["attention_outputs"].swapaxes(1, 2)
        return named

    def _arguments(
        self, inputs: dict[str, jax.Array], mask: Mask | ArrayLike | None = None
    ) -> tuple[list[jax.Array], dict[str, Any]]:
        BHTD = self.metadata.layout == "BHTD"
        qkv = [inputs[name].swapaxes(1, 2) if BHTD else inputs[name] for name in ("query", "key", "value")]
        options = self.options | {name: value for name, value in inputs.items() if name in ("bias", "sinks")}
        if mask is not None:
            options["mask"] = mask
        if self.metadata.layout != "THD":
            return qkv, options
        pads = total.padding(*self.shape[2:])
        return [total.tokens(x, pads[i > 0]) for i, x in enumerate(qkv)], total.options(options, self.shape)

    def request(self, operation: OperationImpl) -> Request:
        """The call's request to an operation; compiles nothing."""
        requests = []

        def ask(inputs: dict[str, jax.Array]) -> None:
            qkv, options = self._arguments(inputs)
            requests.append(operation.request(*qkv, **options))

        if self.metadata.layout == "THD":  # arguments are computed
            jax.eval_shape(ask, self.inputs)
        else:
            ask(self.inputs)
        return requests[0]

    def reasons(self, operation: OperationImpl) -> list[Reason]:
        """Why the operation's forward for the platform can't serve the call."""
        return operation.reasons(self.request(operation))

    def program(self, operation: OperationImpl, gradients: bool = True) -> Function:
        """A function of `arguments` that gives outputs and gradients by name; JAX can transform it."""

        def both(inputs: dict[str, jax.Array], cotangents: dict[str, jax.Array], mask: Mask | None = None) -> PyTree:
            if not gradients:
                return self.call(operation, inputs, mask), {}
            outputs, pull_back = jax.vjp(lambda x: self.call(operation, x, mask), inputs)
            return outputs, pull_back(cotangents)[0]

        return both

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """The arguments of `program`: inputs, cotangents and, if it is traced, the mask."""
        cotangents = {name: jnp.asarray(x) for name, x in self.cotangents.items()}
        mask = self.options.get("mask")
        return (self.inputs, cotangents, jax.tree.map(jnp.asarray, mask) if self.traced_mask else None)

    def run(
        self,
        operation: OperationImpl,
        gradients: bool = True,
        compiler_options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
        """Outputs and gradients by name, under `jax.jit`."""
        program = jax.jit(self.program(operation, gradients), compiler_options=compiler_options)
        outputs, grads = program(*self.arguments)
        return outputs, grads

    def check(
        self,
        operation: OperationImpl,
        gradients: bool = True,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Assert that the operation's outputs and gradients agree with the oracle, by the tolerance rule.

        Raises:
            AssertionError: a result differs too much, has the wrong shape or dtype, or is missing.
            UnsupportedError: the operation refuses the call.
        """
        outputs, grads = self.run(operation, gradients, compiler_options)
        self.check_outputs(outputs)
        if gradients:
            self.check_gradients(grads)

    def check_outputs(self, outputs: dict[str, jax.Array]) -> None:
        """Assert that outputs, by name, agree with the oracle's by the tolerance rule."""
        dtype = self.dtype
        qkv = self.qkv
        exact, narrow = (oracle.attention(*qkv, dtype=d, **self.oracle_options) for d in (np.float64, dtype))
        assert set(outputs) == set(self.cotangents), f"outputs are {set(outputs)}, must be {set(self.cotangents)}"
        assert outputs["attention_outputs"].dtype == dtype
        allowed = tolerance(exact.out, narrow.out, exact.out_magnitude, dtype, OUTPUT_FACTOR)
        assert_close("attention_outputs", outputs["attention_outputs"], exact.out, allowed)
        if "attention_weights" in outputs:
            assert outputs["attention_weights"].dtype == dtype
            allowed = tolerance(exact.weights, narrow.weights, exact.weights, dtype, OUTPUT_FACTOR)
            assert_close("attention_weights", outputs["attention_weights"], exact.weights, allowed)
        if "logsumexp" in outputs:
            assert outputs["logsumexp"].dtype == np.float32
            finite = np.where(np.isfinite(exact.logsumexp), exact.logsumexp, 0)
            allowed = tolerance(exact.logsumexp, narrow.logsumexp, finite, dtype, OUTPUT_FACTOR)
            assert_close("logsumexp", outputs["logsumexp"], exact.logsumexp, allowed)
        if "max_logits" in outputs:
            check_max_logits(outputs["max_logits"], exact.max_logits, qkv, self.oracle_options)

    def check_gradients(self, gradients: dict[str, PyTree]) -> None:
        """Assert that gradients, by the names of `inputs`, agree with the oracle's by the tolerance rule."""
        dtype = self.dtype
        query, key, value = self.qkv
        cotangents = {
            "d_out": self.cotangents["attention_outputs"],
            "d_logsumexp": self.cotangents.get("logsumexp"),
            "d_weights": self.cotangents.get("attention_weights"),
        }
        exact, narrow = (
            oracle.attention_gradients(query, key, value, dtype=d, **cotangents, **self.oracle_options)
            for d in (np.float64, dtype)
        )
        assert set(gradients) == set(exact.values)
        for name, value in exact.values.items():
            if isinstance(self.options.get(name), Bias):
                self._check_structured(gradients[name], exact, narrow)
                continue
            assert gradients[name].dtype == self.inputs[name].dtype
            # A gradient is rounded to its input's dtype at the end.
            widest = max(dtype, gradients[name].dtype, key=lambda d: jnp.finfo(d).eps)
            allowed = tolerance(value, narrow.values[name], exact.magnitudes[name], widest, GRADIENT_FACTOR)
            assert_close(f"gradient of {name}", gradients[name], value, allowed)

    def _structured(self, suffix: str, *gradient: object) -> oracle.Array:
        """The oracle's array of a structured bias (suffix ""), or the gradient of its parameter ("_gradient")."""
        bias, (_, _, T, S) = self.options["bias"], self.shape
        if isinstance(bias, ALiBi):
            return getattr(oracle, f"alibi{suffix}")(*gradient, np.asarray(bias.slopes), T, S)
        if isinstance(bias, ScoreFn) and self.score_pattern is not None:
            return getattr(oracle, f"score_pattern{suffix}")(*gradient, np.asarray(bias.args[0]), self.score_pattern)
        assert isinstance(bias, RelativePosition), f"the oracle does not know {bias!r}"
        shape = T, S, bias.bidirectional, bias.max_distance
        return getattr(oracle, f"relative_position{suffix}")(*gradient, np.asarray(bias.table), *shape)

    def _check_structured(self, gradient: object, exact: oracle.Gradients, narrow: oracle.Gradients) -> None:
        value, other = (self._structured("_gradient", np.float64(g.values["bias"])) for g in (exact, narrow))
        # Distances and counts are not negative, so that magnitudes are computed as gradients are, except for the sign.
        magnitude = np.abs(self._structured("_gradient", exact.magnitudes["bias"]))
        (leaf,) = (x for x in jax.tree.leaves(gradient) if x.dtype != jax.dtypes.float0)
        allowed = tolerance(value, other, magnitude, self.dtype, GRADIENT_FACTOR)
        assert_close("gradient of bias", leaf, value, allowed)


def check_max_logits(
    actual: ArrayLike, exact: oracle.Array, qkv: Sequence[ArrayLike], options: Mapping[str, Any]
) -> None:
    """Assert that the largest scores are as precise as scores in float32, whatever the dtype of the inputs."""
    assert np.asarray(actual).dtype == np.float32
    single = oracle.attention(*qkv[:3], dtype=np.float32, **options).max_logits
    allowed = tolerance(exact, single, np.where(np.isfinite(exact), exact, 0), np.float32, OUTPUT_FACTOR)
    assert_close("max_logits", actual, exact, allowed)
