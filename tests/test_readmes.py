"""The examples of the plugins' and the examples' READMEs run as printed; the README's own are in test_readme.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import XLA_FLAGS

import attnops
from attnops.masks import Causal, Segments
from attnops_caches import DenseCache

ROOT = Path(__file__).parents[1]


def blocks(path: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "printed"),
    [
        ("attnops_ring", r"^$"),
        ("attnops_linear", r"^\[96\] \(1, 1, 4, 64\)\nright T = 1 float32 jit"),
        ("attnops_tpu", r"^\d+$"),
        ("attnops_triton", r"def attnops_flash_forward[\s\S]*\n\d+ 0 \d+ Counter"),
    ],
    ids=["ring", "linear", "tpu", "triton"],
)
@pytest.mark.tier(every=3)
def test_a_plugins_example_runs(plugin: str, printed: str) -> None:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}
    block = "\n".join(blocks(f"plugins/{plugin}/README.md"))
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(printed, run.stdout.strip()), run.stdout[-500:]


@pytest.mark.parametrize(
    "example", ["examples/byte_language_model", "plugins/attnops_lm/src/attnops_lm/sentence_embeddings"]
)
@pytest.mark.tier(quick=["plugins/attnops_lm/src/attnops_lm/sentence_embeddings"])
def test_an_examples_fragment_runs(example: str) -> None:
    x = jnp.ones((1, 4, 2, 8))
    names = {
        "attnops": attnops, "Causal": Causal, "Segments": Segments, "mask": Causal(), "query": x, "key": x, "value": x,
        "ids": jnp.zeros((1, 4), int), "lengths": jnp.array([3]),
        "cache": DenseCache.create(batch=1, length=8, kv_heads=2, head_dim=8, dtype=jnp.float32),
        "op": attnops.OperationRegistry.create("vanilla", attnops.OperationMetadata()),
    }  # fmt: skip
    (block,) = blocks(f"{example}/README.md")
    exec(compile(block, example, "exec"), names)
    out = getattr(names["out"], "attention_outputs", names["out"])
    np.testing.assert_allclose(np.asarray(out)[:, :3], 1.0, rtol=1e-6)


@pytest.mark.slow
def test_the_masks_of_the_readme_are_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("README.md") if "cu_seqlens" in block)
    names = {
        "ids": np.array([[0, 0, 1, 1]]), "cu_seqlens": np.array([0, 2, 4]), "length": 4,
        "attention_mask": np.array([[1, 1, 1, 0]]), "parents": np.array([[-1, 0, 0]]),
        "q_positions": np.array([[3]]), "kv_positions": np.array([[0, 1, 2, 3]]),
        "chosen": np.ones((1, 1, 1, 1), bool),
    }  # fmt: skip
    exec(compile(block, "README.md", "exec"), names)
    assert "█ █ █ ·" in capsys.readouterr().out
