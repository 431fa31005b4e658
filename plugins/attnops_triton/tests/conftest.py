"""What the tests of attnops-triton need: the catalogue beside them, and a JAX that looks for no GPU."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))
