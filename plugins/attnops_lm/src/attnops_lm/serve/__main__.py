"""`python -m attnops.attnops_lm.serve`, or `python -m attnops_lm.serve` in the repository."""

import sys

from attnops_lm.serve.command import main

sys.exit(main())
