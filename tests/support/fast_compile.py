"""How processes that tests start compile programs, which run once: as fast as XLA can."""

from typing import Final

import jaxlib.version

# Without optimisations, the newer emitters of fusions take twice as long; jaxlib 0.11 has no others.
_OLDER_EMITTERS: Final = ("--xla_cpu_use_fusion_emitters=false",) if jaxlib.version.__version_info__ < (0, 11) else ()
XLA_FLAGS: Final = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *_OLDER_EMITTERS,
    ]
)
