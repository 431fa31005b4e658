"""Kernels for Hopper with warps of different tasks, in Gluon."""
