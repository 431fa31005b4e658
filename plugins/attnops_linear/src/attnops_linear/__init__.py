"""attnops-linear: the recurrences of hybrid models, under one contract.

`LinearAttention` (``"linear_attention"``) and `CausalConv1d` (``"causal_conv1d"``) are operations like any other of
attnops: ``OperationRegistry.create("linear_attention", metadata)``. `StateCache` holds the states of a decoder.
"""

from attnops_linear._version import __version__
from attnops_linear.conv import CausalConv1d, ConvOutput
from attnops_linear.operation import LinearArguments, LinearAttention, Reverse
from attnops_linear.output import LinearOutput
from attnops_linear.reference import reference
from attnops_linear.request import LinearRequest
from attnops_linear.state import StateCache

__all__ = [
    "CausalConv1d", "ConvOutput", "LinearArguments", "LinearAttention", "LinearOutput", "LinearRequest", "Reverse",
    "StateCache", "__version__", "reference",
]  # fmt: skip
