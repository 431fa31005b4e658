# /// script
# dependencies = ["torch==2.14.1", "numpy"]
# ///
# shows: torch_sdpa: refuses keys and values of two lengths
# shows: transformers_sdpa: refuses keys and values of two lengths
# The documentation gives key [N, H, S, E] and value [N, H, S, Ev] one S, and its equivalent code raises an error where
# they differ, as the math backend does. The CPU's kernel takes S from the values: where they are longer, it reads
# memory after the keys (pytorch/pytorch pull request 193728); where they are shorter, the last keys have no effect.
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
memory = torch.randn(1, 1, 24, 8)  # 16 keys, and 8 rows of something else
q, k, v = torch.randn(1, 1, 4, 8), memory[:, :, :16], torch.randn(1, 1, 24, 8)
expected = "RuntimeError"
try:
    out = scaled_dot_product_attention(q, k, v)[0, 0].numpy()
    s = np.float64(q[0, 0]) @ np.float64(memory[0, 0]).T / 8**0.5
    over = np.exp(s) / np.exp(s).sum(-1, keepdims=True) @ np.float64(v[0, 0])
    got = f"an output, which is attention over all 24 rows of memory: {np.allclose(out, over, atol=1e-5)}"
except RuntimeError:
    got = "RuntimeError"
print("got", got)
print("expected", expected)
