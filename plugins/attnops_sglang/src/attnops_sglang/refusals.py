"""What the engine is refused when it starts."""

from __future__ import annotations

from typing import Any

from attnops import Reason
from attnops_caches.engines import refusal


def check_runner(runner: Any) -> None:
    """Raise an `UnsupportedError` for what a ``ModelRunner``'s engine has, and the backend can't serve."""
    if reasons := engine_reasons(runner):
        raise refusal(*reasons)


def engine_reasons(runner: Any) -> list[Reason]:
    """Why the backend can't serve an engine."""
    args, reasons = runner.server_args, []
    if runner.use_mla_backend:
        reasons.append(Reason("model", args.model_path, "has latent attention (MLA), whose pool is of another class",
                              "give --attention-backend fa"))  # fmt: skip
    if args.speculative_algorithm is not None:
        reasons.append(Reason("speculative_algorithm", args.speculative_algorithm, "builds the metadata of the "
                              "engine's own backend in its programs", "leave it out"))  # fmt: skip
    for name, off in (("disaggregation_mode", "null"), ("hicache_storage", "disable")):
        if (value := getattr(args, name, off)) != off:
            reasons.append(Reason(name, value, "moves pages in the layout of the engine's own kernel",
                                  "leave it out"))  # fmt: skip
    return reasons
