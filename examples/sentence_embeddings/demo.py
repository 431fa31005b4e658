"""`python demo.py [OPERATION ...]`: embed some sentences with every installed operation, or those named.

Works as a script, loaded by its path, and as a module of its package; the work is in `report.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import attnops

if __package__:
    from .checkpoint import MissingWeightsError
    from .report import run
else:  # by its path, so without a package to import the siblings from
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from sentence_embeddings.checkpoint import MissingWeightsError
    from sentence_embeddings.report import run

__all__ = ["MissingWeightsError", "main", "run"]


def main() -> int:
    """Run the script and return its exit status: `run`'s, or 2 with one line for what only the user can mend."""
    try:
        return run(operations=sys.argv[1:] or None)
    except (MissingWeightsError, attnops.UnknownOperationError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
