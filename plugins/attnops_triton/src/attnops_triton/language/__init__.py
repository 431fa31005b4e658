"""Kernels in Triton's language: functions translated from jaxprs, compilation, launches and the interpreter."""
