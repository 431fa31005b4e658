"""`python -m attnops.examples.causal_lm.serve`, or `python -m examples.causal_lm.serve` in the repository."""

from .command import main

main()
