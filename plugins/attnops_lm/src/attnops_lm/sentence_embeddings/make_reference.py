"""Write `reference.npz` with the original model: transformers and torch, from the same files as the JAX model.

    python -m attnops_lm.sentence_embeddings.make_reference       (in the repository's root; needs torch, transformers)

It shares only the files with the JAX model: the tokenizer is transformers', each sentence is embedded separately,
without padding, and attention is torch's eager one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import numpy as np
import torch
import transformers

from attnops_lm.sentence_embeddings.checkpoint import model_folder
from attnops_lm.sentence_embeddings.corpus import REFERENCE, load_sentences, sentences_digest


def embed_all(folder: Path, sentences: list[str], max_tokens: int, dtype: torch.dtype) -> list[np.ndarray]:
    """N sentences -> N unit vectors [M] of `dtype`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = model.to(dtype).eval()
    embeddings = []
    for sentence in sentences:
        tokens = tokenizer(sentence, truncation=True, max_length=max_tokens, padding=False, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state  # [1, T, M]
        weights = tokens["attention_mask"][..., None].to(dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        embeddings.append(torch.nn.functional.normalize(mean, dim=-1)[0].numpy())
    return embeddings


def count_tokens(folder: Path, sentences: list[str], max_tokens: int) -> list[int]:
    """The tokens of each sentence by transformers' tokenizer, truncated, [CLS] and [SEP] included."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [len(tokenizer(sentence, truncation=True, max_length=max_tokens)["input_ids"]) for sentence in sentences]


def main() -> None:
    """Write the file and print its note."""
    folder = model_folder()
    sentences = load_sentences()
    max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    embeddings = np.stack(embed_all(folder, sentences, max_tokens, torch.float32))
    exact = np.stack(embed_all(folder, sentences, max_tokens, torch.float64))
    note = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "attention": "eager",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    np.savez_compressed(
        REFERENCE,
        embeddings=embeddings,
        num_tokens=np.array(count_tokens(folder, sentences, max_tokens), dtype=np.int32),
        rounding_error=np.abs(embeddings - exact).max(),
        sentences_sha256=sentences_digest(),
        note=json.dumps(note),
    )
    print(f"{REFERENCE.name}: {embeddings.shape[0]} sentences, {REFERENCE.stat().st_size:,} bytes")
    print(json.dumps(note, indent=2))


if __name__ == "__main__":
    main()
