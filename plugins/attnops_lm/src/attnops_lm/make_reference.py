"""Write ``reference.npz``: what transformers computes with SmolLM2's weights, in float64.

Needs torch, transformers and accelerate: ``pip install 'attnops[parity]'``, then
``python -m attnops_lm.make_reference``. Rotary angles and norms are float32 in transformers whatever the dtype.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from attnops_lm.gguf_file import load_tokenizer, smollm2_path

FILE = Path(__file__).with_name("reference.npz")
TEXT = Path(__file__).parent / "sentence_embeddings" / "sentences.txt"
TOKENS, COLUMNS, GENERATED = 512, 96, 200
QUESTION = "Tell me about the history of Paris."


def main() -> None:
    """Compute the reference and write the file."""
    path = smollm2_path()
    tokenizer = load_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.tensor([tokenizer.encode(TEXT.read_text())[:TOKENS]])
    prompt = torch.tensor([tokenizer.encode(tokenizer.chat([{"role": "user", "content": QUESTION}]))])
    with torch.no_grad():
        single = model(tokens).logits[0].double()
        # With a mask: otherwise the prompt's <|im_end|>, which is the padding token too, would be hidden.
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GENERATED, do_sample=False, eos_token_id=None
        )
        model = model.double()
        logits = model(tokens).logits[0]
        answer = torch.log_softmax(model(generated).logits[0, prompt.shape[1] - 1 : -1], -1)
    # The logits of a sample of the vocabulary, and the most probable token at each position.
    columns = np.linspace(0, logits.shape[-1] - 1, COLUMNS).astype(int)
    likelihood = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    np.savez_compressed(
        FILE,
        tokens=tokens[0].numpy().astype(np.int32),
        columns=columns.astype(np.int32),
        logits=logits[:, columns].float().numpy(),
        best=logits.argmax(-1).numpy().astype(np.int32),
        best_logit=logits.amax(-1).float().numpy(),
        # The largest error of transformers in float32, over the whole vocabulary.
        error_of_float32=(single - logits).abs().max().item(),
        perplexity=(-likelihood.mean()).exp().item(),
        question=QUESTION,
        prompt=prompt[0].numpy().astype(np.int32),
        generated=generated[0, prompt.shape[1] :].numpy().astype(np.int32),
        likelihood=answer.gather(1, generated[0, prompt.shape[1] :, None])[:, 0].float().numpy(),
    )


if __name__ == "__main__":
    main()
