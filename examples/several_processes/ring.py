"""Compares attention over a sequence sharded over processes with one device, forward and backward.

On each of two hosts (on a cluster that JAX knows, such as a TPU pod or Slurm, all three options can be left out)::

    python examples/several_processes/ring.py --coordinator 10.0.0.1:1234 --processes 2 --index 0
    python examples/several_processes/ring.py --coordinator 10.0.0.1:1234 --processes 2 --index 1

Every process prints the error of its shard relative to one device's result, and exits with 1 if it exceeds rounding.
Needs ``pip install attnops attnops-ring``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Segments
from attnops.sharding import create_mesh

BOUND = 2e-5


def main() -> int:
    """Run, compare and print the error; the exit status is 1 if it exceeds `BOUND`."""
    options = _options()
    jax.distributed.initialize(
        options.coordinator, options.processes, options.index, heartbeat_timeout_seconds=options.heartbeat
    )
    devices = jax.device_count()
    mesh = create_mesh((1, -1), ("dp", "sp"))
    metadata = OperationMetadata(mesh=mesh)
    length = 32 * devices
    rng = np.random.default_rng(0)  # the same in every process
    q, k, v, d_out = (rng.normal(size=(1, length, h, 16)).astype(np.float32) for h in (4, 2, 2, 4))
    ids = (np.arange(length) * 3 // length)[None]  # three documents

    def both(operation: Any, *qkv: Any) -> Any:
        def attend(*qkv: Any) -> Any:
            return operation(*qkv, mask=Causal() & Segments(ids)).attention_outputs

        out, pull_back = jax.vjp(attend, *qkv[:3])
        return out, *pull_back(qkv[3])

    spec = NamedSharding(mesh, metadata.get_shardings(q, k).query)
    sharded = [jax.make_array_from_callback(x.shape, spec, lambda index, x=x: x[index]) for x in (q, k, v, d_out)]
    program = jax.jit(lambda *x: both(OperationRegistry.create("ring", metadata), *x))
    with jax.default_device(jax.local_devices()[0]):
        expected = jax.jit(lambda *x: both(OperationRegistry.create("attnops:vanilla"), *x))(
            *map(jnp.asarray, (q, k, v, d_out))
        )

    def distance() -> float:
        """The largest difference in this process's shards in one run; NaN if there is a NaN."""
        pairs = zip(program(*sharded), expected, strict=True)
        return float(
            np.max([np.abs(part.data - exact[part.index]).max() for x, exact in pairs for part in x.addressable_shards])
        )

    worst = distance()
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"{who}, {devices} devices: error {worst:.1e} relative to one device", flush=True)
    for _ in range(options.runs - 1):
        worst = float(np.maximum(worst, distance()))
    if options.runs > 1:
        print(f"{who}: {worst:.1e} at most, in {options.runs} runs")
    return int(not worst <= BOUND)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int, help="the number of processes")
    parser.add_argument("--index", type=int, help="the index of this process")
    parser.add_argument(
        "--heartbeat", type=int, default=100, help="seconds after which a silent process counts as dead"
    )
    parser.add_argument("--runs", type=int, default=1, help="number of runs, to test a cluster for longer")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
