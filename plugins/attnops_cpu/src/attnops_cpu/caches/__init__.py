"""Attention over caches in C++: keys and values are read in place, once.

1. `reader`: which calls are refused, with reasons.
2. `bands`: the mask as an interval of positions for each query, which the kernel computes, and the rest as booleans.
3. `attention`: the arrays of a call, and the call of the kernel, `native/decode.inc`.
"""
