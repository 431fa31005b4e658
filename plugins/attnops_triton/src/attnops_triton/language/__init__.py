"""Triton source: how kernels are written, translated from jaxprs, launched and interpreted."""
