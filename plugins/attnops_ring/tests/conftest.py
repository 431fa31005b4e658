"""What the tests of attnops-ring need: eight devices, and a TPU compiler that asks for no TPU, before JAX starts."""

import os

from attnops_tpu.aot import environment

os.environ.update(environment())

import jax

jax.config.update("jax_num_cpu_devices", 8)
