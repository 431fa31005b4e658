"""Whether an operation computes parts of a softmax that add up, and their gradients: see `attnops.kernels.parts`."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dropout import ShiftedKey
from attnops.kernels.parts import partial, share, share_of
from attnops.masks import Causal
from attnops.metadata import OperationMetadata
from attnops.registry import OperationRegistry

# Queries, and keys of which the second part begins in a tile's midst; of the first rows it hides every key.
_T, _S, _CUT = 48, 80, 40
_TOLERANCE: Final = 2e-5


def check_parts(name: str, platform: str, features: str, **fields: Any) -> None:
    """Outputs, logsumexps and every gradient of an operation's parts equal those of `vanilla` over all keys.

    Args:
        name: of the operation.
        platform: where its forward is asked for.
        features: ``"plain"``, a causal mask; ``"bias"``, a bias and a soft cap too; ``"dropout"``, dropout too.
        **fields: of the metadata.

    Raises:
        AssertionError: one differs.
    """
    prob = 0.3 if features == "dropout" else 0.0
    metadata = OperationMetadata(platform=platform, dropout_prob=prob, on_unsupported="error", **fields)
    operation: Any = OperationRegistry.create(name, metadata)
    vanilla: Any = OperationRegistry.create("attnops:vanilla", OperationMetadata(platform="cpu", dropout_prob=prob))
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, n, h, d)), jnp.float32)
        for n, h, d in ((_T, 4, 16), (_S, 2, 16), (_S, 2, 24), (_T, 4, 24))
    )
    d_lse = jnp.asarray(rng.normal(size=(2, 4, _T)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(1, 4, _T, _S)), jnp.float32) if features == "bias" else None
    # Query i stands at i + 20: it sees the second part from the 20th row on.
    offset = _CUT - 20

    def key_of(first: int) -> Any:
        # As if the queries were every fifth of a longer call's, and the keys every other.
        return ShiftedKey(jax.random.key(3), i=3, j=2 * first, i_step=5, j_step=2) if prob else None

    def options(first: int, last: int, bias: Any) -> dict[str, Any]:
        return {
            "mask": Causal(offset=offset - first),
            "bias": None if bias is None else bias[..., first:last],
            "logits_soft_cap": 2.0 if features == "bias" else None,
            "dropout_key": key_of(first),
        }

    def whole(q: Any, k: Any, v: Any, bias: Any) -> Any:
        found = vanilla(q, k, v, return_lse=True, **options(0, _S, bias))
        return found.attention_outputs, found.logsumexp

    (out, lse), pull_back = jax.vjp(whole, q, k, v, bias)
    expected = pull_back((d_out, d_lse))
    # The weight's cotangent: what the rest of the row's softmax takes back.
    d_weight = d_lse - (d_out * out).sum(-1).swapaxes(1, 2)
    total, d_query, d_keys, d_values, d_bias = jnp.zeros_like(out), jnp.zeros_like(q), [], [], []
    weights = jnp.zeros_like(lse)
    for first, last in ((0, _CUT), (_CUT, _S)):
        own = k[:, first:last], v[:, first:last]

        def part(q: Any, k: Any, v: Any, bias: Any, first: int = first, last: int = last) -> Any:
            return share(operation, q, k, v, lse, **options(first, last, bias))

        found, pull_back = jax.vjp(part, q, *own, bias)
        alone = jax.jit(lambda q, k, v, f=first, n=last: partial(operation, q, k, v, **options(f, n, bias)))(q, *own)
        for x, y in zip(found, share_of(alone, lse), strict=True):
            _same("a share", x, y)
        total, weights = total + found.out, weights + found.weight
        d = pull_back(type(found)(d_out, d_weight))
        d_query += d[0]
        d_keys.append(d[1])
        d_values.append(d[2])
        d_bias.append(d[3])
    _same("the output", total, out)
    _same("the weight of all", weights, jnp.ones_like(weights))
    _same("query's gradient", d_query, expected[0])
    _same("keys' gradient", jnp.concatenate(d_keys, axis=1), expected[1])
    _same("values' gradient", jnp.concatenate(d_values, axis=1), expected[2])
    if bias is not None:
        _same("the bias's gradient", sum(d_bias), expected[3])


def _same(what: str, found: Any, expected: Any) -> None:
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=_TOLERANCE * scale, rtol=0, err_msg=what)
