"""SGLang's engine itself, from its entry point to its tokens, on the CPU: a small Llama with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SCRIPT = Path(__file__).parent / "greedy.py"
FIRST = [[(7 * i + j) % 256 for j in range(n)] for i, n in enumerate((5, 40, 17, 90))]
# Prompts that begin as others of the first call, and end otherwise.
SECOND = [[*FIRST[3][:50], 1, 2, 3], [*FIRST[1][:33], 9], [8] * 3]
NEW = 12
# The engine's own attention on CPUs has no head dim but multiples of 128.
HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, INNER = 128, 4, 2, 128, 2, 256, 256


def save(path: Path) -> None:
    """The checkpoint of a Llama with random weights."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    # Else embeddings decide the tokens, whatever the layers add.
    arrays = {
        "model.embed_tokens.weight": 0.05 * weights(VOCABULARY, HIDDEN),
        "lm_head.weight": weights(VOCABULARY, HIDDEN),
    }
    arrays["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        sizes = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM}
        arrays |= {f"{layer}.self_attn.{x}.weight": weights(size, HIDDEN) for x, size in sizes.items()}
        arrays[f"{layer}.self_attn.o_proj.weight"] = weights(HIDDEN, HEADS * DIM)
        arrays |= {f"{layer}.mlp.{x}.weight": weights(INNER, HIDDEN) for x in ("gate_proj", "up_proj")}
        arrays[f"{layer}.mlp.down_proj.weight"] = weights(HIDDEN, INNER)
    save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def tokens(folder: Path, backend: str, page_size: int) -> list[list[int]]:
    command = [sys.executable, str(SCRIPT), str(folder), backend, str(page_size), json.dumps([FIRST, SECOND]), str(NEW)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (answers,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
    return json.loads(answers)


def test_greedy_tokens_are_those_of_the_engines_own_attention(tmp_path: Path) -> None:
    """Prompts of 3 to 90 tokens in steps of 64, decoded together, some over pages that earlier ones have written."""
    save(tmp_path)
    # With larger pages the engine's own attention on CPUs takes padding for tokens.
    found, wanted = tokens(tmp_path, "attnops", 16), tokens(tmp_path, "native", 1)
    assert [len(x) for x in found] == [NEW] * (len(FIRST) + len(SECOND))
    assert found == wanted
    assert len({tuple(x) for x in found}) == len(found), "the weights decide nothing"
