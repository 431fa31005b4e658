"""What kernels of any language share, for whoever writes or wraps one: nothing here knows a platform.

For a kernel that exists and is wrapped:

- `attnops.masks.Mask.split` takes a mask apart into a band, segments and a rest; a request has its
  ``mask_structure``, by which ``unsupported`` refuses what the kernel has not;
- `zero_unseen` zeroes tokens that no query sees, which may hold NaN; `repair_empty_rows` gives queries that see no key
  what the contract says;
- `pad_to_multiple` and `unpad` bring lengths to a multiple, the padding in a segment of its own;
- `once_differentiable` refuses a second derivative with a message, `not_differentiable` the first;
- `equally_varying` and `output_like` serve `jax.shard_map`, inside which a kernel's inputs vary over mesh axes.

For a kernel that is written from the contract: `of_mask` and `of_bias` take masks and biases apart into what is
computed once a token and what for each score, `describe` says what is done to scores, `ragged` and `merged` fit block
maps to tiles, `folds_batch` and `one_by_one` serve `jax.vmap`, `is_differentiated` and `cotangents` rules of
`jax.custom_vjp`. `FlashBackend` is the skeleton of flash attention: a kernel that fills it in has the
derivative and partial softmaxes (`attnops.softmax`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnops.kernels.coverage import map_shape, merged, ragged
    from attnops.kernels.elementwise import Elementwise, of_bias, of_mask
    from attnops.kernels.flash import FlashBackend, FlashCall
    from attnops.kernels.nograd import not_differentiable, once_differentiable
    from attnops.kernels.outputs import output_like
    from attnops.kernels.padding import Padded, pad_to_multiple, unpad
    from attnops.kernels.reverse import REVERSE_ONLY, reverse_mode_only
    from attnops.kernels.rules import cotangents, inexact_vjp, is_differentiated
    from attnops.kernels.scoring import Scoring, describe, elementwise_bias
    from attnops.kernels.unseen import repair_empty_rows, zero_unseen
    from attnops.kernels.varying import equally_varying
    from attnops.kernels.vjp import Operands
    from attnops.kernels.vmap import Foldable, folds_batch, one_by_one

__all__ = [
    "REVERSE_ONLY",
    "Elementwise",
    "FlashBackend",
    "FlashCall",
    "Foldable",
    "Operands",
    "Padded",
    "Scoring",
    "cotangents",
    "describe",
    "elementwise_bias",
    "equally_varying",
    "folds_batch",
    "inexact_vjp",
    "is_differentiated",
    "map_shape",
    "merged",
    "not_differentiable",
    "of_bias",
    "of_mask",
    "once_differentiable",
    "one_by_one",
    "output_like",
    "pad_to_multiple",
    "ragged",
    "repair_empty_rows",
    "reverse_mode_only",
    "unpad",
    "zero_unseen",
]

# Imported when asked for: the dispatcher imports a module of this package, and others import the dispatcher.
_MODULES: Final = (
    "coverage", "elementwise", "flash", "nograd", "outputs", "padding", "reverse", "rules", "scoring", "unseen",
    "varying", "vjp", "vmap",

)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"attnops.kernels.{module}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
