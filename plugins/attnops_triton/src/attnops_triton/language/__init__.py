"""Kernels as Triton source: written, translated from jaxprs, launched or interpreted."""
