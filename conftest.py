"""What every folder of tests needs, before JAX starts."""

import os

# Devices of the CPU that exchange arrays share its cores with other tests: one that comes 40 seconds late, on a machine
# that is busy, would end the process.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_PATIENCE}".strip()
