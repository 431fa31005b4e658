"""`python -m attnops.examples.causal_lm.serve`, or `python -m examples.causal_lm.serve` in the repository."""

import sys

from .command import main

sys.exit(main())
