"""Helpers to write or wrap a kernel, in any language and for any platform.

To wrap an existing kernel:

- `attnops.masks.Mask.split` splits a mask into a band, segments and a residual mask; ``unsupported`` can refuse a
  request by its ``mask_structure``;
- `zero_unseen` zeroes fully masked tokens, which may hold NaN; `repair_empty_rows` sets the contract's values for
  queries that see no key;
- `pad_to_multiple` and `unpad` pad lengths to a multiple, the padding in a separate segment;
- `once_differentiable` refuses a second derivative with a message, `not_differentiable` a first;
- `equally_varying`, `varies` and `output_like` are for `jax.shard_map`, inside which inputs vary over mesh axes.

To write a kernel for the contract: `of_mask` and `of_bias` split masks and biases into values per token and a function
of scores, `describe` returns what is done to scores, `ragged` and `merged` adapt block maps to tiles, `folds_batch` and
`one_by_one` are rules of `jax.vmap`.
`FlashBackend` is the skeleton of flash attention: a kernel that implements it has derivatives of every order and
partial softmaxes (`attnops.softmax`). Another loop over keys has derivatives of every order by `Passes` and `attend`.
`TraceContext` is for values set by a ``with`` block that traces depend on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from attnops.kernels.context import TraceContext  # not lazily: its JAX context must exist before the first trace
from attnops.programs.varying import equally_varying, varies

if TYPE_CHECKING:
    from attnops.kernels.block_maps import map_shape, merged, ragged
    from attnops.kernels.derivatives import Passes, Result, ReverseInputs, Statistics, attend
    from attnops.kernels.elementwise import Elementwise
    from attnops.kernels.flash import FlashBackend, FlashCall, Operands
    from attnops.kernels.nograd import not_differentiable, once_differentiable
    from attnops.kernels.outputs import output_like
    from attnops.kernels.padding import Padded, pad_to_multiple, unpad
    from attnops.kernels.parts import of_bias, of_mask
    from attnops.kernels.rules import inexact_vjp
    from attnops.kernels.scoring import Scoring, describe, elementwise_bias
    from attnops.kernels.unseen import repair_empty_rows, zero_unseen
    from attnops.kernels.vmap import Foldable, folds_batch, one_by_one

__all__ = [
    "Elementwise", "FlashBackend", "FlashCall", "Foldable", "Operands", "Padded", "Passes", "Result", "ReverseInputs",
    "Scoring", "Statistics", "TraceContext", "attend", "describe", "elementwise_bias", "equally_varying", "folds_batch",
    "inexact_vjp", "map_shape", "merged", "not_differentiable", "of_bias", "of_mask", "once_differentiable",
    "one_by_one", "output_like", "pad_to_multiple", "ragged", "repair_empty_rows", "unpad", "varies", "zero_unseen",
]  # fmt: skip

# Imported at the first use: the dispatcher imports a module of this package, and other modules import the dispatcher.
_MODULES: Final = (
    "block_maps", "derivatives", "elementwise", "flash", "nograd", "outputs", "padding", "parts", "rules",
    "scoring", "unseen", "vmap",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            value = vars(importlib.import_module(f"attnops.kernels.{module}")).get(name)
            if value is not None:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
