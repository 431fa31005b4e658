"""`python -m attnops`: the command of attnops-cli."""

import sys

try:
    from attnops_cli import main
except ModuleNotFoundError as error:
    if error.name != "attnops_cli":
        raise
    sys.exit("The attnops command is in attnops-cli, which is not installed: pip install attnops-cli")

main()
