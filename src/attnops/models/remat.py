"""Checkpoint policies: what the backward pass of an attention layer keeps, and what it recomputes.

Attention's gradients need q, k, v, the output and the logsumexp. They also need the `[B, H, T, S]` weights, but a
kernel recomputes those tile by tile from the logsumexp. Under `jax.checkpoint` a layer keeps only what its policy
names, and recomputes everything else by running its forward again:

- ``nothing_saveable`` keeps the layer's input only. The forward runs twice, including attention, which is quadratic in
  the length and the most expensive part at long lengths.
- ``save_attention`` also keeps the tagged output and logsumexp: ``B * T * H * (Dv * itemsize + 8)`` bytes per layer,
  linear in the length. Projections and norms run twice (cheap, linear), the attention kernel once. The usual choice.
- ``dots_saveable`` keeps the result of every matmul. With a fused kernel that is every projection: memory of several
  times the input, little recompute. With an unfused attention it keeps the `[B, H, T, S]` scores: quadratic memory.
- ``everything_saveable`` is no checkpointing. The offloading policies keep values in host memory: no recompute and no
  accelerator memory, but a transfer each way, worth it only where it hides behind compute.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

if TYPE_CHECKING:
    from collections.abc import Mapping

OUTPUT_NAME = "attnops_output"
LOGSUMEXP_NAME = "attnops_logsumexp"

Policy = Callable[..., Any]
Tree = TypeVar("Tree")

_POLICIES: dict[str, Policy] = {
    name: getattr(jax.checkpoint_policies, name)
    for name in (
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "checkpoint_dots",
        "dots_with_no_batch_dims_saveable",
        "checkpoint_dots_with_no_batch_dims",
    )
} | {"save_attention": jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, LOGSUMEXP_NAME)}

# Each factory with valid arguments, which the error of a wrong call quotes.
_FACTORIES: dict[str, str] = {
    "save_only_these_names": f'"{OUTPUT_NAME}", "{LOGSUMEXP_NAME}"',
    "save_any_names_but_these": f'"{OUTPUT_NAME}"',
    "save_anything_except_these_names": f'"{OUTPUT_NAME}"',
    "save_from_both_policies": '"save_attention", "dots_with_no_batch_dims_saveable"',
    "offload_dot_with_no_batch_dims": '"device", "pinned_host"',
    "save_and_offload_only_these_names": "names_which_can_be_saved=[], "
    f'names_which_can_be_offloaded=["{OUTPUT_NAME}"], offload_src="device", offload_dst="pinned_host"',
}


def tag(x: Tree, name: str) -> Tree:
    """Name the arrays of ``x`` (an array or a pytree) so that a policy can choose them; the values are unchanged.

    A kernel with a ``jax.custom_vjp`` must tag what its forward *rule* stores as residuals. Tagging the result of
    the call names another value: the residuals stay unnamed and the policy runs the kernel again to get them.
    Free at run time and in memory; without a policy that names it, a tag has no effect.
    """
    return checkpoint_name(x, name)  # type: ignore[no-untyped-call,no-any-return]


def get_gradient_checkpoint_policy(name: str, *args: Any, **kwargs: Any) -> Policy:
    """The rematerialisation policy called ``name``, for ``jax.checkpoint(..., policy=...)``.

    Args:
        name: ``"save_attention"`` (keep the values tagged `OUTPUT_NAME` and `LOGSUMEXP_NAME`, nothing else), or the
            name of any of ``jax.checkpoint_policies``.
        *args: arguments of a policy factory: names of tagged values for ``save_only_these_names``,
            ``save_any_names_but_these`` and ``save_anything_except_these_names``; two policies, or their names, for
            ``save_from_both_policies``; source and destination memory kinds for ``offload_dot_with_no_batch_dims``.
        **kwargs: keyword arguments of a policy factory, such as ``save_and_offload_only_these_names``.

    Raises:
        ValueError: ``name`` is unknown (near matches are listed); a factory lacks its arguments or they are of the
            wrong kind (the error shows a valid call); or a policy that is not a factory was given arguments.

    Warns:
        UserWarning: for ``save_anything_except_these_names``, whose names JAX does not read.
    """
    if name in _POLICIES:
        if args or kwargs:
            raise ValueError(
                f'policy "{name}" takes no arguments and was given {_shown(args, kwargs)}; '
                f"those that take some are {_listed(_FACTORIES)}"
            )
        return _POLICIES[name]
    if name not in _FACTORIES:
        known = [*_POLICIES, *_FACTORIES]
        near = difflib.get_close_matches(str(name), known, n=3)
        hint = f"did you mean {_listed(near)}?" if near else f"the known ones are {_listed(known)}"
        raise ValueError(f"unknown gradient checkpoint policy {name!r}; {hint}")
    if name == "save_from_both_policies":
        args = tuple(get_gradient_checkpoint_policy(p) if isinstance(p, str) else p for p in args)
    try:
        _require_names(name, args, kwargs)
        policy: Policy = getattr(jax.checkpoint_policies, name)(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f'policy "{name}" cannot be made from the arguments {_shown(args, kwargs)} ({error}); '
            f'call for example get_gradient_checkpoint_policy("{name}", {_FACTORIES[name]})'
        ) from error
    if name == "save_anything_except_these_names":
        warnings.warn(
            f"JAX's {name} reads no names: it saves everything, {_listed(args)} included, since a name marks a copy of "
            'a value that stays saveable itself; list what to keep instead, with "save_only_these_names"',
            stacklevel=2,
        )
    return policy


def _require_names(factory: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise a `TypeError` for arguments that JAX would accept as names of no value, and so save nothing."""
    if factory == "save_and_offload_only_these_names":
        if bare := [k for k, v in kwargs.items() if k.startswith("names_") and isinstance(v, str)]:
            raise TypeError(f"{bare[0]} must be a list of names")
    elif factory.endswith(("_these_names", "_but_these")) and not (args and all(isinstance(a, str) for a in args)):
        raise TypeError("one or more names must follow, each a separate string")
    elif factory == "save_from_both_policies" and not all(map(callable, args)):
        raise TypeError("a policy is a callable or a name")


def _listed(names: Any) -> str:
    return ", ".join(f'"{n}"' for n in names)


def _shown(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    return f"({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"
