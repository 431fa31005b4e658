"""The flash kernels as functions in Triton's language; `parameters` has what they are called with."""
