"""Helpers for models: heads, dtypes, checkpoint policies, configs."""
