# /// script
# dependencies = ["torch==2.14.1"]
# ///
# shows: torch_sdpa: refuses keys and values of two lengths
# The documentation gives key [N, H, S, E] and value [N, H, S, Ev] the same S, and promises no error. Read as a caller:
# a call that breaks a documented shape should raise, as it does with a mask; here 24 keys meet 16 values.
import torch
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 24, 8), torch.randn(1, 1, 16, 8)
expected = "RuntimeError"
try:
    got = f"an output of shape {tuple(scaled_dot_product_attention(q, k, v).shape)}"
except RuntimeError:
    got = "RuntimeError"
print("got", got)
print("expected", expected)
