"""What the tests of attnops-tpu need: a compiler that asks for no TPU, before JAX starts."""

import os

from attnops_tpu.aot import environment

os.environ.update(environment())
