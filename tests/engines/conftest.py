"""Tests of engines: in an environment of their own (`make engines`), on four devices of the CPU."""

import os

# Before JAX starts: devices for meshes, and libtpu as a compiler alone, which asks no metadata server.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
