"""`python -m attnops.examples.sentence_embeddings`, or `python -m examples.sentence_embeddings` in the repository."""

import sys

from .demo import main

sys.exit(main())
