"""`attnops prove`: whether the kernels of this machine's device work, and how fast, each check in its own process."""
