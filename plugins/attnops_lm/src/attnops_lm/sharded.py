"""Compares a model sharded over processes with one device: logits, with and without caches, and generated tokens.

On each of two hosts (on a cluster that JAX knows, such as a TPU pod or Slurm, all three options can be left out)::

    python -m attnops_lm.sharded --coordinator 10.0.0.1:1234 --processes 2 --index 0
    python -m attnops_lm.sharded --coordinator 10.0.0.1:1234 --processes 2 --index 1

Each process prints the error of its shards relative to one device's result, and exits with 1 if it exceeds rounding
or the tokens differ.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx

from attnops.sharding import create_mesh
from attnops_lm.testing import small

B, T, S = 4, 12, 16
BOUND = 2e-5


def main() -> int:
    """Run, compare and print the error; the exit status is 1 if it exceeds `BOUND`."""
    options = _options()
    jax.distributed.initialize(options.coordinator, options.processes, options.index)
    mesh = create_mesh((-1, 2), ("dp", "tp"))
    ids = np.random.default_rng(0).integers(0, 96, (B, T))  # the same in every process
    model = small()
    with jax.default_device(jax.local_devices()[0]):
        expected = np.asarray(_logits(model, ids, None)[0])
        tokens = model.generate(ids, max_new_tokens=4).tokens

    sharded: Any = model.shard_model(mesh=mesh)
    kernel = sharded.layers[0].mlp.up.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (32, 48 // 2)
    worst = 0.0
    for logits in _logits(sharded, ids, {"mesh": mesh}):
        for part in logits.addressable_shards:
            error = np.abs(np.asarray(part.data) - expected[part.index]).max() / np.abs(expected).max()
            worst = float(np.maximum(worst, error))
    whole = sharded.gather_model()
    for gathered, given in zip(jax.tree.leaves(nnx.state(whole)), jax.tree.leaves(nnx.state(model)), strict=True):
        assert np.array_equal(np.asarray(gathered), np.asarray(given))
    assert np.array_equal(sharded.generate(ids, max_new_tokens=4).tokens, tokens)
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"{who}, {jax.device_count()} devices: error {worst:.1e} relative to one device", flush=True)
    return int(not worst <= BOUND)


def _logits(model: Any, ids: np.ndarray, shardings: Any) -> tuple[jax.Array, jax.Array]:
    """The logits of all tokens, without caches, and with empty caches to which they are appended in one call."""
    graphdef, state = nnx.split(model)
    caches = model.init_cache(B, S, shardings=shardings)

    @jax.jit
    def both(state: Any, caches: Any) -> tuple[jax.Array, jax.Array]:
        merged = nnx.merge(graphdef, state)
        return merged(ids).logits, merged(ids, past_key_values=caches).logits

    return both(state, caches)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int, help="the number of processes")
    parser.add_argument("--index", type=int, help="the index of this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
