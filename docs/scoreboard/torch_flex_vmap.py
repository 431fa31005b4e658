# /// script
# dependencies = ["torch==2.14.1"]
# ///
# shows: torch_flex: vmap
# The documentation of FlexAttention does not speak of torch.vmap, and that of torch.vmap names no exception for it.
# torch's scaled_dot_product_attention has it. Inside, a table of transformations lacks vmap, hence a KeyError.
import torch
from torch.nn.attention.flex_attention import flex_attention

q = torch.randn(2, 1, 1, 4, 8)
expected = "an output, or an error that says that vmap is not served"
try:
    got = f"{torch.vmap(flex_attention)(q, q, q)}"
except RuntimeError as error:
    got = "KeyError(<TransformType.Vmap: 1>)" if "KeyError(<TransformType.Vmap" in str(error) else str(error)
print("got", got)
print("expected", expected)
