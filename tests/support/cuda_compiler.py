"""XLA's compiler for NVIDIA GPUs, on a host without one: programs as they would run, for an H100.

jax-cuda13-pjrt has the compiler. It is in a folder of its own, since JAX would start it in every process if it were
installed: ``pip install --no-deps --target .venv/xla-cuda jax-cuda13-pjrt==JAX'S VERSION``, as `make test-all` does.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from jaxlib import gpu_triton

FOLDER = Path(os.environ.get("ATTNOPS_XLA_CUDA", Path(sys.prefix) / "xla-cuda"))
PLUGIN = FOLDER / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"

# What XLA asks of a GPU; of an H100 SXM.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
"""


@functools.cache
def device() -> Any:
    """A GPU that programs are compiled for, and can't run on."""
    from jax._src.lib import xla_client
    from jax_cuda13_plugin import cuda_plugin_extension

    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(PLUGIN))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    register = cuda_plugin_extension.register_custom_call_target
    register(api, "triton_kernel_call", gpu_triton.get_custom_call(), "CUDA", 0)
    for name, value in gpu_triton._cuda_triton.registrations().items():
        register(api, name, value, "CUDA", 1)
    topology = xla_client.make_c_api_device_topology(api, "1x1x1", target_config=H100, topology="1x1x1")
    return topology._make_compile_only_devices()[0]


def compiled(program: Any, *arguments: Any) -> Any:
    """A function under `jax.jit`, compiled for arguments of these shapes."""
    sharding = SingleDeviceSharding(device())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return program.trace(*given).lower(lowering_platforms=("cuda",)).compile()
