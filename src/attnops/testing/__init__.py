"""Proof that an operation is right: the float64 oracle and the tolerance rule."""

from attnops.testing.oracle import Gradients, Result, attention, attention_gradients, dropout_keep
from attnops.testing.tolerance import assert_close

__all__ = ["Gradients", "Result", "assert_close", "attention", "attention_gradients", "dropout_keep"]
