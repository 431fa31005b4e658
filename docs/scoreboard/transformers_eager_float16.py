# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///
# shows: transformers_eager: q · k above 65,504, float16
# The documentation (attention interface) says nothing of float16's range. q · k is 96,000, which overflows, before the
# scale makes 24,000 of it, which does not; torch's scaled_dot_product_attention gives the expected value.
import types

import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

module = types.SimpleNamespace(num_key_value_groups=1, head_dim=16, training=False)
q = torch.full((1, 1, 1, 16), 150.0, dtype=torch.float16)
k = torch.full((1, 1, 2, 16), 40.0, dtype=torch.float16)
k[:, :, 1] *= 0.9
v = torch.tensor([1.0, 2.0], dtype=torch.float16).reshape(1, 1, 2, 1)
got = eager_attention_forward(module, q, k, v, None, scaling=0.25)[0]
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)
print("got", got)
print("expected", expected)
