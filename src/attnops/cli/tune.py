"""`attnops tune`: measure tile sizes on this machine, into a table that a plugin reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from attnops.cli.output import fail, print_text
from attnops.dispatch.registry import OperationRegistry
from attnops.errors import PluginError

MASKS: Final = ("full", "causal")


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    operation: Annotated[str, typer.Argument(help="Name of the operation, or distribution:operation.")] = "flash",
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="bfloat16")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option("-D", "--head-dim", help="May be repeated.", show_default="64, 128")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="In tokens; may be repeated.", show_default="4096")] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="full or causal; may be repeated.", show_default="both")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The table to write; its rows are kept if it is there.")] = None,
    merge: Annotated[list[Path] | None, typer.Option(help="A table whose rows are added; may be repeated.")] = None,
    dry: Annotated[str, typer.Option(metavar="ARCH", help="Compile for a GPU, such as sm_90; time nothing.")] = "",
) -> None:
    """Time tile sizes near the default ones, and the vendor's kernel, and write a table of the fastest.

    Runs before a model does, not while it runs: without a table nothing is measured. With `--merge` alone it joins
    tables. The operation's class has a static method ``tune`` for it, with these options as arguments.
    """
    if unknown := set(mask or ()) - set(MASKS):
        fail(f"mask={min(unknown)!r} must be one of {list(MASKS)}", 2)
    try:
        cls = OperationRegistry.get(operation, platform or ("cuda" if dry else None))
        tune = getattr(cls, "tune", None)
        if tune is None:
            fail(ValueError(f"{cls.__module__}.{cls.__name__} has no tile sizes to tune"), 2)
        tune(
            dtypes=dtype or ["bfloat16"], head_dims=head_dim or [64, 128], lengths=length or [4096],
            masks=mask or list(MASKS), output=output, merge=merge or [], dry=dry, report=print_text,
        )  # fmt: skip
    except (ValueError, PluginError) as error:
        fail(error, 2)
