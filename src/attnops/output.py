"""OperationOutput: what an attention operation returns."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.exported import serialised

# The fields that a call has only if it asks for them, by option.
OPTIONAL_FIELDS: Final = {
    "return_weights": "attention_weights", "return_lse": "logsumexp", "return_max_logits": "max_logits"
}  # fmt: skip


@serialised()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OperationOutput:
    """The result of an attention operation; a pytree.

    Attributes:
        attention_outputs: [B, T, H, Dv] ([B, H, T, Dv] in the layout "BHTD"; in "THD" all are without B), in the
            query's dtype unless the metadata's ``runtime_dtype`` is set.
        attention_weights: [B, H, T, S], in the dtype of ``attention_outputs``: the weights of the values, after softmax
            and dropout. None unless asked for with ``return_weights=True``.
        logsumexp: [B, H, T] float32, the natural logarithm of the softmax's denominator, including sinks, before
            dropout; −inf for a fully masked row. None unless asked for with ``return_lse=True``.
        max_logits: [B, H, T] float32, the largest score that each query sees, with scale, soft cap and bias, without
            sinks; −inf for a fully masked row, NaN where a score is NaN or +inf. It has no gradient. None unless asked
            for with ``return_max_logits=True``.
    """

    attention_outputs: jax.Array
    attention_weights: jax.Array | None = None
    logsumexp: jax.Array | None = None
    max_logits: jax.Array | None = None

    def replace(self, **changes: Any) -> OperationOutput:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, arrays unchanged."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OperationOutput:
        """The inverse of `to_dict`. Fields left out are None.

        Raises:
            TypeError: ``data`` has a key that is not a field, or lacks ``attention_outputs``.
        """
        return cls(**data)

    def to_json(self, **kwargs: Any) -> str:
        """The fields as JSON; arrays with dtype, shape and their bytes in base64, so that nothing is rounded.

        Args:
            **kwargs: passed to `json.dumps`.
        """
        return json.dumps({name: _encode(value) for name, value in self.to_dict().items()}, **kwargs)

    @classmethod
    def from_json(cls, json_str: str) -> OperationOutput:
        """The inverse of `to_json`."""
        return cls.from_dict({name: _decode(value) for name, value in json.loads(json_str).items()})


def _encode(array: jax.Array | None) -> dict[str, Any] | None:
    if array is None:
        return None
    host = np.asarray(array)
    data = base64.b64encode(host.tobytes()).decode("ascii")
    return {"dtype": host.dtype.name, "shape": host.shape, "data": data}


def _decode(value: dict[str, Any] | None) -> jax.Array | None:
    if value is None:
        return None
    flat = np.frombuffer(base64.b64decode(value["data"]), dtype=jnp.dtype(value["dtype"]))
    return jnp.asarray(flat.reshape(value["shape"]))
