"""Kernels for Blackwell's data centre GPUs (sm_100), whose products are in tensor memory."""
