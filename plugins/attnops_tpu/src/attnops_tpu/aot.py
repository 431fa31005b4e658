"""Compile for any TPU generation on a host without a TPU: libtpu contains the compiler, which needs no TPU.

    with `environment()` in `os.environ` before JAX is used:
    compiled = compile_for(function, [jax.ShapeDtypeStruct(...), ...], "v6e")
    compiled.memory_analysis().temp_size_in_bytes

Needs the extra ``attnops-tpu[aot]``, which exists for Linux on x86.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax

if TYPE_CHECKING:
    from attnops.typing import Function, PyTree

# The smallest slice of each generation.
TOPOLOGIES: Final = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def environment() -> dict[str, str]:
    """Environment variables to set before JAX starts, so that libtpu queries no metadata server and needs no TPU."""
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def devices(generation: str, topology: str | None = None) -> list[jax.Device]:
    """The devices of a slice, for compilation only.

    Args:
        generation: one of `TOPOLOGIES`.
        topology: a slice such as ``"v5p:4x4x4"``; None for the smallest.

    Raises:
        ValueError: the generation is unknown.
        ImportError: libtpu is not installed.
    """
    if generation not in TOPOLOGIES:
        raise ValueError(f"generation={generation!r} is unknown; use one of {list(TOPOLOGIES)}")
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ImportError("the TPU compiler is not installed; pip install 'attnops-tpu[aot]'") from error
    from jax.experimental import topologies

    name = topology or TOPOLOGIES[generation]
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


def compile_for(
    function: Function, arguments: PyTree, generation: str, donated: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """A function compiled for one TPU, a `jax.stages.Compiled`.

    Args:
        function: a function of arrays, or of pytrees of them.
        arguments: its arguments, arrays or `jax.ShapeDtypeStruct`.
        generation: one of `TOPOLOGIES`.
        donated: the numbers of the arguments whose buffers the results may reuse.
    """
    from attnops_tpu.generations import target

    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), list(arguments))
    with target(generation):
        return jax.jit(function, donate_argnums=donated).trace(*placed).lower(lowering_platforms=("tpu",)).compile()
