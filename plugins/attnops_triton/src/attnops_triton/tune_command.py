"""`attnops tune` measures tile sizes on this machine's GPU and writes a table that `attnops_triton.tuned` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from attnops_cli.noise import find_devices
from attnops_cli.output import fail, print_text
from attnops_triton.flash.tune import run

MASKS: Final = ("full", "causal")


# typer makes a command-line option of each parameter.
def command(
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="bfloat16")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option("-D", "--head-dim", help="May be repeated.", show_default="64, 128")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="In tokens; may be repeated.", show_default="4096")] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="full or causal; may be repeated.", show_default="both")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The table to write; the rows of an existing table are kept.")
    ] = None,
    merge: Annotated[list[Path] | None, typer.Option(help="A table whose rows are added; may be repeated.")] = None,
    dry: Annotated[str, typer.Option(metavar="ARCH", help="Compile for a GPU, such as sm_90; time nothing.")] = "",
) -> None:
    """Time tile sizes near the defaults of attnops-triton, and cuDNN, and write a table of the fastest.

    Run it before a model: a model measures nothing while it runs. With `--merge` tables are joined and nothing is
    timed.
    """
    if unknown := set(mask or ()) - set(MASKS):
        fail(f"mask={min(unknown)!r} must be one of {list(MASKS)}", 2)
    find_devices()
    try:
        run(dtype or ["bfloat16"], head_dim or [64, 128], length or [4096], mask or list(MASKS), output, merge or [],
            dry, print_text)  # fmt: skip
    except ValueError as error:
        fail(error, 2)
