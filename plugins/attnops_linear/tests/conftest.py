"""Four devices, before JAX starts."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
