"""`python -m attnops`: the command line."""

from attnops.cli import main

main()
