"""A problem: the concrete arguments of one call, what the oracle says of it, and how an operation does on it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import ALiBi, Bias, RelativePosition
from attnops.dropout import dropout_seed
from attnops.masks.base import Mask
from attnops.metadata import OperationMetadata
from attnops.operation import OperationImpl
from attnops.output import OperationOutput
from attnops.testing import oracle
from attnops.testing.tolerance import assert_close, tolerance

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of attention.

    Attributes:
        query: [B, T, H, D], whatever the metadata's layout.
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        options: the contract's options, as the caller gives them.
        metadata: the metadata that the operation is made with.
        seed: of the random cotangents.
    """

    query: Any
    key: Any
    value: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)
    seed: int = 0

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
        return {name: jax.tree.map(jnp.asarray, x) for name, x in given.items()}

    @functools.cached_property
    def oracle_options(self) -> dict[str, Any]:
        """The options as the oracle takes them: masks and dropout as boolean arrays."""
        options = {
            name: value
            for name, value in self.options.items()
            if name in ("bias", "softmax_scale", "logits_soft_cap", "sinks") and value is not None
        }
        if isinstance(options.get("bias"), Bias):
            options["bias"] = self._structured("")
        mask = self.options.get("mask")
        if mask is not None:
            options["mask"] = np.asarray(mask.dense(*self.shape) if isinstance(mask, Mask) else mask)
        if self.options.get("dropout_key") is not None and self.metadata.dropout_prob:
            words = dropout_seed(self.options["dropout_key"])
            prob = options["dropout_prob"] = self.metadata.dropout_prob
            options["keep"] = oracle.dropout_keep(words, prob, self.shape)
        return options

    @functools.cached_property
    def cotangents(self) -> dict[str, Any]:
        """Random cotangents of every output that is asked for, in the outputs' dtypes."""
        rng = np.random.default_rng(self.seed)
        B, H, T, S = self.shape
        out = {"attention_outputs": rng.normal(size=(B, T, H, self.value.shape[-1])).astype(self.query.dtype)}
        if self.options.get("return_lse"):
            out["logsumexp"] = rng.normal(size=(B, H, T)).astype(np.float32)
        if self.options.get("return_weights"):
            out["attention_weights"] = rng.normal(size=(B, H, T, S)).astype(self.query.dtype)
        return out

    def call(self, operation: OperationImpl, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Run the call with other values for its inputs; outputs that are not None, by name, heads after length."""
        BHTD = self.metadata.layout == "BHTD"
        qkv = [inputs[name].swapaxes(1, 2) if BHTD else inputs[name] for name in ("query", "key", "value")]
        rest = {name: value for name, value in inputs.items() if name in ("bias", "sinks")}
        result: OperationOutput = operation(*qkv, **(self.options | rest))
        named = {name: value for name, value in result.to_dict().items() if value is not None}
        if BHTD:
            named["attention_outputs"] = named["attention_outputs"].swapaxes(1, 2)
        return named

    def run(self, operation: OperationImpl, gradients: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Outputs and gradients by name, under `jax.jit`."""

        @jax.jit
        def both(inputs: Any, cotangents: Any) -> Any:
            if not gradients:
                return self.call(operation, inputs), {}
            outputs, pull_back = jax.vjp(lambda x: self.call(operation, x), inputs)
            return outputs, pull_back(cotangents)[0]

        cotangents = {name: jnp.asarray(x) for name, x in self.cotangents.items()}
        outputs, grads = both(self.inputs, cotangents)
        return outputs, grads

    def check(self, operation: OperationImpl, gradients: bool = True) -> None:
        """Assert that the operation's outputs and gradients agree with the oracle, by the tolerance rule.

        Raises:
            AssertionError: one does not, or has the wrong shape or dtype, or is missing.
            UnsupportedError: the operation refuses the call.
        """
        outputs, grads = self.run(operation, gradients)
        self.check_outputs(outputs)
        if gradients:
            self.check_gradients(grads)

    def check_outputs(self, outputs: dict[str, Any]) -> None:
        """See `check`."""
        dtype = self.query.dtype
        qkv = (self.query, self.key, self.value)
        exact, narrow = (oracle.attention(*qkv, dtype=d, **self.oracle_options) for d in (np.float64, dtype))
        assert set(outputs) == set(self.cotangents), f"outputs are {set(outputs)}, must be {set(self.cotangents)}"
        assert outputs["attention_outputs"].dtype == dtype
        allowed = tolerance(exact.out, narrow.out, exact.out_magnitude, dtype, 2)
        assert_close("attention_outputs", outputs["attention_outputs"], exact.out, allowed)
        if "attention_weights" in outputs:
            assert outputs["attention_weights"].dtype == dtype
            allowed = tolerance(exact.weights, narrow.weights, exact.weights, dtype, 2)
            assert_close("attention_weights", outputs["attention_weights"], exact.weights, allowed)
        if "logsumexp" in outputs:
            assert outputs["logsumexp"].dtype == np.float32
            finite = np.where(np.isfinite(exact.logsumexp), exact.logsumexp, 0)
            allowed = tolerance(exact.logsumexp, narrow.logsumexp, finite, dtype, 2)
            assert_close("logsumexp", outputs["logsumexp"], exact.logsumexp, allowed)

    def check_gradients(self, gradients: dict[str, Any]) -> None:
        """See `check`."""
        dtype = self.query.dtype
        cotangents = {
            "d_out": self.cotangents["attention_outputs"],
            "d_logsumexp": self.cotangents.get("logsumexp"),
            "d_weights": self.cotangents.get("attention_weights"),
        }
        exact, narrow = (
            oracle.attention_gradients(
                self.query, self.key, self.value, dtype=d, **cotangents, **self.oracle_options
            )
            for d in (np.float64, dtype)
        )  # fmt: skip
        assert set(gradients) == set(exact.values)
        for name, value in exact.values.items():
            if isinstance(self.options.get(name), Bias):
                self._check_structured(gradients[name], exact, narrow)
                continue
            assert gradients[name].dtype == self.inputs[name].dtype
            # A gradient is rounded to its own input's dtype at the end.
            widest = max(dtype, gradients[name].dtype, key=lambda d: jnp.finfo(d).eps)
            allowed = tolerance(value, narrow.values[name], exact.magnitudes[name], widest, 3)
            assert_close(f"gradient of {name}", gradients[name], value, allowed)

    def _structured(self, what: str, *gradient: Any) -> Any:
        """What the oracle says of a structured bias: its array, or its parameter's gradient from the array's."""
        bias, (_, _, T, S) = self.options["bias"], self.shape
        if isinstance(bias, ALiBi):
            return getattr(oracle, f"alibi{what}")(*gradient, np.asarray(bias.slopes), T, S)
        assert isinstance(bias, RelativePosition), f"the oracle does not know {bias!r}"
        shape = T, S, bias.bidirectional, bias.max_distance
        return getattr(oracle, f"relative_position{what}")(*gradient, np.asarray(bias.table), *shape)

    def _check_structured(self, gradient: Any, exact: oracle.Gradients, narrow: oracle.Gradients) -> None:
        value, other = (self._structured("_gradient", np.float64(g.values["bias"])) for g in (exact, narrow))
        # Distances and counts are not negative, so magnitudes go the way of the gradients but for their sign.
        magnitude = np.abs(self._structured("_gradient", exact.magnitudes["bias"]))
        (leaf,) = jax.tree.leaves(gradient)
        allowed = tolerance(value, other, magnitude, self.query.dtype, 3)
        assert_close("gradient of bias", leaf, value, allowed)
