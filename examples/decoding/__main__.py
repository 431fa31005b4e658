"""`python -m attnops.examples.decoding`, or `python -m examples.decoding` in the repository."""

import sys

from .demo import main

sys.exit(main())
