"""Functions of scalars as programs: traced once, compared by what they compute, and evaluated on arrays or in kernels.

The arrays that a function closes over become data of its program, like its arguments, so a program can be a cache key:
equal programs compute the same, and they hold no functions or arrays of the caller.
"""
