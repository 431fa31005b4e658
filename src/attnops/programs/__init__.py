"""Functions of scalars as programs: traced once, compared by what they compute, and evaluated on arrays or in kernels.

What a function closes over becomes data of its program, as its arguments are, so that a program can be a key of caches:
equal programs compute the same, and none holds a function or an array of the caller's.
"""
