"""A kernel that adds a number to an array, in place of attention's, and the recipe of its program."""

import dataclasses

from attnops_triton.language.build import Recipe
from attnops_triton.language.compat import jitted
from attnops_triton.language.source import KernelFunction

TEXT = "def copy(x, n, options):\n    tl.store(x[1], tl.load(x[0]) + n[0])\n"


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a kernel without any."""


def copy_recipe(arch: str, text: str = TEXT, stages: int = 1) -> Recipe:
    """The recipe of a copy of int32, one program with 4 warps."""
    kernel = KernelFunction(jitted("copy", text), ("x", "y"), ("n",), NoOptions())
    return Recipe(kernel, ("int32", "int32"), frozenset(), 4, stages, arch)
