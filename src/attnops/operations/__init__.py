"""The core's implementations of operations."""
