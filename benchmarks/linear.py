"""Linear attention on this machine's processor.

The contenders are attnops-cpu, the native forward, a scan over tokens, and transformers' chunked rule in PyTorch.

    pip install attnops-cpu torch transformers
    python benchmarks/linear.py [--tokens 4096] [--json FILE]

The gated delta rule as Qwen3-Next calls it, float32, B 1, 16 heads of D = Dv = 128: forward, and forward and backward
(gradients of all arrays). Programs are compiled before. Contenders are called in turn, and the shortest time of
each counts. Outputs are compared with the scan's before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata
from attnops_cli.output import print_table
from attnops_linear import LinearAttention, reference
from attnops_testing.bench.machine import describe_machine

HEADS, DIM = 16, 128
Timed = Callable[[], object]


def arrays(tokens: int) -> dict[str, np.ndarray]:
    """Normalised queries and keys, values, decays and betas."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, tokens, HEADS, DIM)) for _ in range(3))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    decay = -rng.exponential(0.1, size=(1, tokens, HEADS))
    found = {"query": query, "key": key, "value": value, "decay": decay, "beta": rng.random((1, tokens, HEADS))}
    return {name: x.astype(np.float32) for name, x in found.items()}


def of_jax(function: Callable[..., Any], given: dict[str, np.ndarray]) -> tuple[Timed, Timed]:
    """Calls of a function of JAX, forward, and with its gradients."""
    inputs = {name: jnp.asarray(x) for name, x in given.items()}
    forward = jax.jit(lambda x: function(**x)[0]).lower(inputs).compile()
    both = jax.jit(jax.grad(lambda x: (function(**x)[0] * x["value"]).sum())).lower(inputs).compile()
    return lambda: jax.block_until_ready(forward(inputs)), lambda: jax.block_until_ready(both(inputs))


def of_torch(given: dict[str, np.ndarray]) -> tuple[Timed, Timed]:
    """Calls of transformers' `torch_chunk_gated_delta_rule`, forward, and with its gradients."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs = {name: torch.from_numpy(x) for name, x in given.items()}

    def forward(x: dict[str, Any]) -> Any:
        return torch_chunk_gated_delta_rule(
            x["query"], x["key"], x["value"], g=x["decay"], beta=x["beta"], use_qk_l2norm_in_kernel=False
        )[0]

    def plain() -> Any:
        with torch.inference_mode():
            return forward(inputs).numpy()

    def both() -> Any:
        x = {name: y.detach().requires_grad_() for name, y in inputs.items()}
        (forward(x) * x["value"].detach()).sum().backward()
        return {name: y.grad for name, y in x.items()}

    return plain, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = arrays(options.tokens)
    contenders: dict[str, tuple[Timed, Timed]] = {}
    try:
        from attnops_cpu.linear.operation import CpuLinearAttention

        contenders["attnops-cpu"] = of_jax(CpuLinearAttention(OperationMetadata(on_unsupported="error")), given)
    except ImportError as error:
        print(f"without attnops-cpu's kernel: {error}")
    contenders |= {"native": of_jax(LinearAttention(), given), "scan over tokens": of_jax(reference, given)}
    versions = {"jax": jax.__version__}
    try:
        contenders["transformers, PyTorch"] = of_torch(given)
        versions |= {name: version(name) for name in ("torch", "transformers")}
    except ImportError as error:
        print(f"without PyTorch's rule: {error}")
    expected = np.asarray(contenders["scan over tokens"][0]())
    for name, (forward, _) in contenders.items():
        error = np.abs(np.asarray(forward()) - expected).max() / np.abs(expected).max()
        assert error < 1e-4, f"{name} is off by {error}"
    times: dict[str, list[float]] = {name: [float("inf")] * 2 for name in contenders}
    for i in range(options.repeats):
        for name, calls in contenders.items():
            # The scan's gradient keeps a state a token, and takes long.
            for part, call in enumerate(calls):
                if part and i > 0 and name == "scan over tokens":
                    continue
                start = time.perf_counter()
                call()
                times[name][part] = min(times[name][part], time.perf_counter() - start)
    ours = next(iter(times.values()))
    rows = [
        [name, *(f"{t * 1e3:,.0f} ms" for t in found), *(f"{t / o:.2f}" for t, o in zip(found, ours, strict=True))]
        for name, found in times.items()
    ]
    print(describe_machine(), versions)
    print_table(["", "forward", "forward + backward", f"÷ {next(iter(times))}", "÷ the same"], rows)
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, "versions": versions, "seconds": times}))


if __name__ == "__main__":
    main()
