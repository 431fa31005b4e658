"""Checks of an operation's partial softmaxes (`attnops.softmax`) and their gradients."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.registry import OperationRegistry
from attnops.dropout import ShiftedKey
from attnops.masks import Causal
from attnops.softmax import Contribution, PartialSoftmax, contribution, merge

# Queries; keys; and where the keys are split in two, inside a tile. The first queries see no key of the second chunk.
_T, _S, _SPLIT = 48, 80, 40
_TOLERANCE: Final = 2e-5


def _arrays(features: str) -> tuple[list[jax.Array], jax.Array, jax.Array | None]:
    """Query, key, value and the output's cotangent; the logsumexp's cotangent; and the bias."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=(2, n, h, d)), jnp.float32)
        for n, h, d in ((_T, 4, 16), (_S, 2, 16), (_S, 2, 24), (_T, 4, 24))
    ]
    d_lse = jnp.asarray(rng.normal(size=(2, 4, _T)), jnp.float32)
    if features not in ("bias", "low"):
        return arrays, d_lse, None
    values = rng.normal(size=(1, 4, _T, _S))
    if features == "low":
        values[:, :, 30:34] = -1e9
    return arrays, d_lse, jnp.asarray(values, jnp.float32)


# One comparison: the functions in it share the problem and its options.
def check_partial(name: str, platform: str, features: str, **fields: Any) -> None:
    """Outputs, logsumexps, largest scores and gradients of partials equal those of `vanilla` over all keys.

    Args:
        name: the name of the operation.
        platform: the platform of the forward.
        features: ``"plain"``, a causal mask; ``"bias"``, a bias and a soft cap; ``"low"``, a bias that puts some
            rows at −1e9, where float32 rounding loses log(l) in the logsumexp; ``"dropout"``, dropout.
        **fields: fields of the metadata.

    Raises:
        AssertionError: a result differs.
    """
    prob = 0.3 if features == "dropout" else 0.0
    metadata = OperationMetadata(platform=platform, dropout_prob=prob, on_unsupported="error", **fields)
    operation: Any = OperationRegistry.create(name, metadata)
    vanilla: Any = OperationRegistry.create("attnops:vanilla", OperationMetadata(platform="cpu", dropout_prob=prob))
    (q, k, v, d_out), d_lse, bias = _arrays(features)
    # Query i is at position i + 20, so that queries from the 20th on see keys of the second chunk.
    offset = _SPLIT - 20

    def key_of(first: int) -> ShiftedKey | None:
        # The queries are every fifth of a longer call's, the keys every other.
        return ShiftedKey(jax.random.key(3), i=3, j=2 * first, i_step=5, j_step=2) if prob else None

    def options(first: int, last: int, bias: jax.Array | None) -> dict[str, Any]:
        return {
            "mask": Causal(offset=offset - first),
            "bias": None if bias is None else bias[..., first:last],
            "logits_soft_cap": 2.0 if features == "bias" else None,
            "dropout_key": key_of(first),
        }

    def unsplit(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> Any:
        output = vanilla(q, k, v, return_lse=True, return_max_logits=True, **options(0, _S, bias))
        return (output.attention_outputs, output.logsumexp), output.max_logits

    @jax.jit
    def whole(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> Any:
        outputs, pull_back, highest = jax.vjp(unsplit, q, k, v, bias, has_aux=True)
        return outputs, highest, pull_back((d_out, d_lse))

    (out, lse), highest, expected = whole(q, k, v, bias)
    # The cotangent of the contribution's weight.
    d_weight = d_lse - (d_out * out).sum(-1).swapaxes(1, 2)
    spans = (0, _SPLIT), (_SPLIT, _S)

    @jax.jit
    def partials_of(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> list[PartialSoftmax]:
        asked = {"return_max_logits": True}
        return [operation.partial(q, k[:, a:b], v[:, a:b], **options(a, b, bias), **asked) for a, b in spans]

    @jax.jit
    def gradients_of(
        q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, lse: jax.Array, residual: jax.Array
    ) -> list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
        d = Contribution(d_out, d_weight)
        return [
            operation.partial_vjp(
                q, k[:, a:b], v[:, a:b], lse, residual, d, wants_bias=bias is not None, **options(a, b, bias)
            )
            for a, b in spans
        ]

    partials = partials_of(q, k, v, bias)
    total_out, total_lse, total_residual, total_highest = jax.jit(merge)(*partials)
    _same("the merged output", total_out, out)
    _same("the merged logsumexp", total_lse, lse)
    assert total_highest is not None
    _same("the merged largest scores", total_highest, highest)
    shares = [jax.jit(contribution)(partial, total_lse, total_residual) for partial in partials]
    gradients = gradients_of(q, k, v, bias, total_lse, total_residual)
    total, weights = (sum(x) for x in zip(*shares, strict=True))
    d_query = sum(d[0] for d in gradients)
    d_keys, d_values, d_bias = ([d[i] for d in gradients] for i in (1, 2, 3))
    _same("the sum of contributions", total, out)
    _same("the sum of their weights", weights, jnp.ones_like(weights))
    _same("query's gradient", d_query, expected[0])
    _same("keys' gradient", jnp.concatenate(d_keys, axis=1), expected[1])
    _same("values' gradient", jnp.concatenate(d_values, axis=1), expected[2])
    if bias is not None:
        _same("the bias's gradient", jnp.concatenate(d_bias, axis=3), expected[3])


def _same(what: str, actual: jax.Array, expected: jax.Array) -> None:
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual, expected, atol=_TOLERANCE * scale, rtol=0, err_msg=what)
