"""attnops' attention inside SGLang's engine for TPUs: ``--attention-backend attnops``.

sglang-jax has no entry points for backends. `PATCH` adds the choice to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnops_sglang._version import __version__

if TYPE_CHECKING:
    from attnops_sglang.backend import EngineAttention
    from attnops_sglang.pool import EnginePages

__all__ = ["PATCH", "__version__", "create_backend", "pool_class"]

# A patch of sglang-jax, at the revision that the README names.
PATCH: Final = Path(__file__).with_name("sglang-jax.patch")


def create_backend(runner: Any) -> EngineAttention:
    """The attention backend of a ``ModelRunner``.

    Raises:
        UnsupportedError: the engine has latent attention, speculative decoding, pages that move between hosts, or pages
            that a TPU can't read in place.
    """
    from attnops_sglang.backend import EngineAttention
    from attnops_sglang.refusals import check_runner

    check_runner(runner)
    return EngineAttention(
        runner.num_attn_heads, runner.num_kv_heads, runner.model_config.head_dim, page_size=runner.page_size,
        mesh=runner.mesh, max_pages=-(-runner.model_config.context_len // runner.page_size) + 1,
    )  # fmt: skip


def pool_class() -> type[EnginePages]:
    """The class of the engine's pool of keys and values, in place of ``MHATokenToKVPool``."""
    from attnops_sglang.pool import EnginePages

    return EnginePages
