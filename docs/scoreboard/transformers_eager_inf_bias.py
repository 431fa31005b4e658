# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///
# shows: transformers_eager: rows of −inf bias
# The documentation says nothing of a row of −inf. transformers' own masks use finfo.min; callers may pass their own.
# Query 0 sees no key and its output is not used. Expected: the gradient of query 1 alone; got: NaN, as 0 · NaN is.
import types

import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

module = types.SimpleNamespace(num_key_value_groups=1, head_dim=4, training=False)
q, k, v = torch.randn(3, 1, 1, 2, 4)
mask = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]])[None, None]


def gradient(q, mask):
    key = k.clone().requires_grad_()
    eager_attention_forward(module, q, key, v, mask)[0][:, -1].sum().backward()
    return key.grad


got = gradient(q, mask)
expected = gradient(q[:, :, 1:], mask[:, :, 1:])
print("got", got)
print("expected", expected)
