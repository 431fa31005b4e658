"""The assemblers (ptxas) of CUDA 12.9 and 13, with which jaxlib assembles Triton kernels.

Triton's own, which is newer than those of machines, hides what they refuse.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_WHEELS = Path(str(importlib.metadata.distribution("nvidia-cuda-nvcc").locate_file("nvidia")))
ASSEMBLERS = tuple(_WHEELS / folder / "bin" / "ptxas" for folder in ("cuda_nvcc", "cu13"))
