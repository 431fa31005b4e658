"""`python -m attnops.examples.causal_lm`, or `python -m examples.causal_lm` in the repository."""

import sys

from .demo import run

sys.exit(run(operations=sys.argv[1:] or None))
