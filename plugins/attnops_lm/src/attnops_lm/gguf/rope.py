"""Rotary positions of GGUF files, as Hugging Face's fields."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from attnops_lm.gguf.fields import Fields
from attnops_lm.rotary import RotaryConfig, inverse_frequencies, yarn_mscale

FREQUENCIES: Final = "rope_freqs.weight"  # by what rotary frequencies are divided
# What Llama 3.1 and later ones have besides a factor. GGUF files only have the divisors that follow from all of it.
_LLAMA3: Final = {
    "rope_type": "llama3", "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0
}  # fmt: skip


def rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` if positions are scaled.

    Raises:
        ValueError: they are scaled in a way that is not computed here.
    """
    base, scaling = fields.positive("rope.freq_base", 1e4), _scaling(fields)
    tensors = fields.file.tensors
    if FREQUENCIES in tensors:
        if scaling is not None:
            raise ValueError(
                f"the GGUF file has {FREQUENCIES} and {fields.name}.rope.scaling.factor: only one can hold"
            )
        fields.file.used.add(FREQUENCIES)
        scaling = _llama3(base, head_dim, tensors[FREQUENCIES].data)
    return {"rope_theta": base} | ({} if scaling is None else {"rope_scaling": scaling})


def _scaling(fields: Fields) -> dict[str, Any] | None:
    kind, factor = fields.get("rope.scaling.type", "linear"), fields.get("rope.scaling.factor")
    factor = fields.get("rope.scale_linear") if factor is None else factor  # older files
    more = {x: fields.get(f"rope.scaling.{x}") for x in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")}
    attention, extrapolation = (fields.get(f"rope.scaling.yarn_{x}_factor") for x in ("attn", "ext"))
    if kind == "none" or (kind in ("linear", "yarn") and factor in (None, 0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{fields.name}.rope.scaling.type={kind!r} must be one of none, linear, yarn; use safetensors")
    if attention is not None and not np.isclose(attention, yarn_mscale(factor), rtol=1e-4):
        raise ValueError(
            f"{fields.name}.rope.scaling.yarn_attn_factor={attention} must be YaRN's own {yarn_mscale(factor):g}, or "
            f"left out: programs read others in different ways"
        )
    if extrapolation not in (None, 1, -1):
        raise ValueError(f"{fields.name}.rope.scaling.yarn_ext_factor={extrapolation} must be 1, or left out")
    given = {
        "original_max_position_embeddings": more["original_context_length"] or fields.one("context_length"),
        "beta_fast": more["yarn_beta_fast"], "beta_slow": more["yarn_beta_slow"],
    }  # fmt: skip
    return {"rope_type": "yarn", "factor": factor} | {x: y for x, y in given.items() if y is not None}


def _llama3(base: float, head_dim: int, divisors: np.ndarray) -> dict[str, Any]:
    """The ``rope_scaling`` of Llama 3.1 from which the divisors of the frequencies follow.

    Raises:
        ValueError: they follow from no such one.
    """
    scaling = _LLAMA3 | {"factor": float(divisors.max())}
    plain, _ = inverse_frequencies(RotaryConfig(head_dim=head_dim, base=base))
    scaled, _ = inverse_frequencies(RotaryConfig.from_config({"rope_scaling": scaling}, head_dim=head_dim, base=base))
    expected = plain / scaled
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4):
        raise ValueError(
            f"{FREQUENCIES} divides rotary frequencies by {divisors[0]:g} to {divisors[-1]:g}, and not as Llama 3.1 "
            f"does with a factor of {scaling['factor']:g} and an original length of 8192; use safetensors"
        )
    return scaling
