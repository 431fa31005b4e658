"""vLLM itself, from its entry point to its tokens, on the CPU: a small Llama with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parent / "greedy.py"
PROMPTS = [[(7 * i + j) % 256 for j in range(n)] for i, n in enumerate((5, 40, 17, 90))]
NEW = 12
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "SKIP_JAX_PRECOMPILE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.2,
    "eos_token_id": None,
}  # fmt: skip


def saved(path: Path) -> Any:
    """A Llama with random weights, and in ``path`` its checkpoint."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager", dtype=torch.float32)
    # Else embeddings decide the tokens, whatever the layers add.
    model.get_input_embeddings().weight.data.mul_(0.05)
    model.save_pretrained(path)
    return model.eval()


def run(folder: Path, backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), backend, json.dumps(PROMPTS), str(NEW)]
    env = os.environ | ENVIRONMENT | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Prompts of 5 to 90 tokens in steps of 64: chunks of prompts and decoded tokens of several rows in one call."""
    model = saved(tmp_path)
    done = run(tmp_path, "attnops", MODEL_IMPL_TYPE="vllm")
    assert done.returncode == 0, done.stderr[-3000:]
    whole = [model.generate(torch.tensor([x]), max_new_tokens=NEW, do_sample=False)[0].tolist() for x in PROMPTS]
    (answers,) = (line for line in done.stdout.splitlines() if line.startswith("[["))  # beside the engine's own lines
    assert json.loads(answers) == [x[-NEW:] for x in whole]


def test_models_in_jax_are_refused_at_start(tmp_path: Path) -> None:
    saved(tmp_path)
    done = run(tmp_path, "attnops", MODEL_IMPL_TYPE="flax_nnx")
    assert done.returncode != 0
    assert "MODEL_IMPL_TYPE=flax_nnx: the engine's models in JAX call its own kernel" in done.stdout + done.stderr
