"""`attnops list`: every operation that is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from attnops_cli.installed import computes, describe, find, platforms
from attnops_cli.output import print_json, print_table, print_text


def command(
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load", help="Whether to import distributions, to see whether they work and what they serve."
        ),
    ] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what distributions and their libraries print when imported.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every field.")] = False,
) -> None:
    """List operations by what they compute, platform, distribution, version and state.

    `auto` picks operations of the kind "attention"; "other" ones run only by name. The platforms are those for which
    an operation has a separate forward; "any" is plain JAX, and "?" is not known before the import.
    """
    installed = find(load, verbose)
    plugins = installed.plugins
    if json:
        print_json([describe(plugin, plugins) for plugin in plugins])
        return
    rows = [
        (
            plugin.operation,
            computes(plugin) or "?",
            "?" if (served := platforms(plugin, plugins)) is None else ", ".join(served),
            plugin.distribution,
            plugin.version,
            str(plugin.state),
        )
        for plugin in plugins
    ]
    print_table(("operation", "computes", "platforms", "distribution", "version", "state"), rows)
    causes = [f"{plugin.name} is {plugin.state}: {plugin.cause}" for plugin in plugins if plugin.cause]
    faults = [f"{name} is faulty: {fault}" for name, fault in installed.faults]
    notes = [*causes, *faults, *(trouble.what for trouble in installed.troubles), *installed.ambiguous]
    if notes:
        print_text("\n" + "\n".join(notes))
