"""Kernels for Blackwell's data centre GPUs (sm_100), whose tensor cores write products to tensor memory."""
