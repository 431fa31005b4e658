"""The fields of one architecture, each of which must be read or have a value that changes nothing."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attnops_lm.gguf.file import GGUFFile

# Fields that say nothing about the computation, or only what the tensors say too.
_NO_EFFECT: Final = {
    "vocab_size", "tensor_data_layout", "pooling_type", "attention.layer_norm_epsilon", "rope.scaling.finetuned",
    "classifier.output_labels", "feed_forward_length",
}  # fmt: skip
# Fields that change the computation, with the values that don't.
_NEUTRAL: Final = {
    "attention.causal": (True,), "attention.scale": (0,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,), "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "expert_count": (0,),
    "expert_used_count": (0,), "expert_shared_count": (0, 1), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "expert_weights_scale": (0, 1), "leading_dense_block_count": (0,),
    "rope.scaling.attn_factor": (1,), "rope.scaling.alpha": (0,), "rope.scaling.yarn_log_multiplier": (0,),
}  # fmt: skip


class Fields:
    """The fields of a file's architecture, by their names without it."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.name = file, file.architecture
        start = f"{self.name}."
        self._values = {x.removeprefix(start): y for x, y in file.fields.items() if x.startswith(start)}
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, or ``default``; a float is the shortest decimal that rounds to the file's float32."""
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, name: str) -> Any:
        """A field's value.

        Raises:
            ValueError: there is none.
        """
        if (value := self.get(name)) is None:
            raise ValueError(f"the GGUF file has no field {self.name}.{name}, which is needed")
        return value

    def one(self, name: str, default: Any = None) -> Any:
        """A field's number, if it is the same in all layers; needed without ``default``.

        Raises:
            ValueError: layers differ, or there is none.
        """
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self.name}.{name}={value} must be the same in all layers")
            value = value[0]
        return value

    def positive(self, name: str, default: Any = None) -> Any:
        """As `one`, for a finite number above 0; `ValueError` for anything else."""
        value = self.one(name, default)
        if not isinstance(value, int | float) or not 0 < value < np.inf:
            raise ValueError(f"{self.name}.{name}={value!r} must be a number above 0")
        return value

    def check(self, name: str, *allowed: Any) -> None:
        """Raise `ValueError` if a field is there and has no allowed value."""
        if (value := self.get(name, allowed[0])) not in allowed:
            raise ValueError(
                f"{self.name}.{name}={value!r} is not computed here: it must be one of {allowed}, or left out"
            )

    def check_all_read(self) -> None:
        """Raise `ValueError` if a field is left that was not read, and is not known to change nothing."""
        for name in sorted(self._values.keys() - self._read - _NO_EFFECT):
            if name not in _NEUTRAL:
                raise ValueError(
                    f"{self.name}.{name}={self._values[name]!r} is not known here, and may change what is computed: "
                    f"use safetensors"
                )
            self.check(name, *_NEUTRAL[name])
