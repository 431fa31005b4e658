"""What the tests of attnops-ring need: a TPU compiler that asks for no TPU, before JAX starts."""

import os

from attnops_tpu.aot import environment

os.environ.update(environment())
