"""Control flow of a program inside `jax.shard_map`; its bodies were traced outside, where no array varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax

from attnops.programs.program import bind
from attnops.programs.tracing import CALLS, closed_program
from attnops.programs.varying import equally_varying
from attnops.typing import JaxprLike, PyTree


def control_flow(name: str, params: dict[str, JaxprLike], inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a ``cond``, ``while`` or ``scan``, whose bodies are traced again.

    Args:
        name: the name of the primitive.
        params: its parameters.
        inputs: arrays that vary over the same mesh axes.
    """
    if name == "cond":
        index, *operands = inputs
        return list(lax.switch(index, [_function(branch, operands) for branch in params["branches"]], *operands))
    if name == "while":
        n, m = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = inputs[:n], inputs[n : n + m], list(inputs[n + m :])
        proceed, step = (_function(params[key], inputs) for key in ("cond_jaxpr", "body_jaxpr"))
        return lax.while_loop(lambda x: proceed(*cond_consts, *x)[0], lambda x: step(*body_consts, *x), carry)
    n, m = _scan_counts(params)
    consts, start, slices = inputs[:n], list(inputs[n : n + m]), list(inputs[n + m :])
    body = _function(params["jaxpr"], inputs)

    def one(carry: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        results = body(*consts, *carry, *xs)
        return results[:m], results[m:]

    last, stacked = lax.scan(one, start, slices, length=params["length"], reverse=params["reverse"])
    return [*last, *stacked]


def _scan_counts(params: dict[str, JaxprLike]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.12 the operands are described by a tree: constants, carry, slices.
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _function(closed: JaxprLike, like: Sequence[jax.Array]) -> Callable[..., list[jax.Array]]:
    """A jaxpr as a function whose results vary over the same mesh axes as ``like``."""
    program = closed_program(closed, CALLS)
    assert program is not None, "the bodies of a program without constants have none"
    return lambda *given: equally_varying((program.run(given, bind), list(like)))[0]
