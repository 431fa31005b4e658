"""`python -m examples.byte_language_model`, in the repository."""

import sys

from .train import main

sys.exit(main())
