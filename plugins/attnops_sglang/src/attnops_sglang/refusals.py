"""What the engine is refused when it starts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from attnops import Reason
from attnops_caches.engines import pages_shape, refusal


def check_runner(runner: Any) -> None:
    """Raise an `UnsupportedError` for what a ``ModelRunner``'s engine has, and the backend can't serve."""
    if reasons := engine_reasons(runner):
        raise refusal(*reasons)
    # The pool is made after the weights are loaded, which takes minutes.
    config = runner.model_config
    dtype = jnp.bfloat16 if runner.server_args.kv_cache_dtype == "bf16" else config.dtype
    pages_shape(1, runner.page_size, 1, config.head_dim, dtype)


def engine_reasons(runner: Any) -> list[Reason]:
    """Why the backend can't serve an engine."""
    args, reasons = runner.server_args, []
    if runner.use_mla_backend:
        reasons.append(Reason("model", args.model_path, "has latent attention (MLA), whose pool is of another class",
                              "give --attention-backend fa"))  # fmt: skip
    if args.speculative_algorithm is not None:
        reasons.append(Reason("speculative_algorithm", args.speculative_algorithm, "builds the metadata of the "
                              "engine's own backend in its programs", "leave it out"))  # fmt: skip
    moves = {"disaggregation_mode": "null", "pd_disaggregation": "", "hicache_storage": "disable"}
    for name, off in moves.items():
        if (value := getattr(args, name, off)) != off:
            reasons.append(Reason(name, value, "moves pages in the layout of the engine's own kernel",
                                  "leave it out"))  # fmt: skip
    return reasons
