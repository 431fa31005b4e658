# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///
# shows: transformers_eager: rows of −inf bias
# The documentation says nothing of a row of −inf. transformers' own masks use finfo.min; callers may pass their own.
# Query 0 sees no key and its output is not used. Expected: the gradient of query 1 alone; got: NaN, as 0 · NaN is.
import types

import numpy as np
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

torch.manual_seed(0)
module = types.SimpleNamespace(num_key_value_groups=1, head_dim=4, training=False)
q, k, v = (torch.randn(1, 1, 2, 4) for _ in range(3))
k.requires_grad_()
mask = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]])[None, None]
eager_attention_forward(module, q, k, v, mask)[0][:, 1].sum().backward()
got = k.grad[0, 0].numpy()
q, k, v = (x.detach().double().numpy()[0, 0] for x in (q, k, v))
p = np.exp(q[1] @ k.T / 2) / np.exp(q[1] @ k.T / 2).sum()
expected = (p * (v.sum(-1) - p @ v.sum(-1)))[:, None] * q[1] / 2
print("got", got)
print("expected", expected)
