"""Kernels for Hopper in Gluon, whose groups of warps have different tasks."""
