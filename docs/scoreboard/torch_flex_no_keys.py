# /// script
# dependencies = ["torch==2.14.1"]
# ///
# shows: torch_flex: no keys (S = 0)
# The documentation: key [B, Hkv, S, E], with no limit of S. torch's scaled_dot_product_attention gives zeros here, as
# FlexAttention does for rows whose mask hides every key.
import torch
from torch.nn.attention.flex_attention import flex_attention

q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 0, 8), torch.randn(1, 1, 0, 8)
expected = "zeros, or an error that says what is not served"
try:
    got = f"{flex_attention(q, k, v)}"
except IndexError as error:
    got = f"IndexError: {error}"
print("got", got)
print("expected", expected)
