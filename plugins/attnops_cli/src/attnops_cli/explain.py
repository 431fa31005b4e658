"""`attnops explain`: which operation would run a call, and why the others would not."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import AbstractMesh, use_abstract_mesh

from attnops.dispatch.explain import Explanation, explain
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.platforms import find_platform
from attnops.dispatch.ranking import Candidate
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import PluginError, PluginWarning, Reason, UnsupportedError
from attnops.operations.vanilla import VanillaAttention
from attnops.sharding.modes import printed_mode
from attnops_cli.installed import FOR_PLATFORM
from attnops_cli.masks import parse_mask, parse_shape
from attnops_cli.noise import find_devices
from attnops_cli.output import fail, print_json, print_text
from attnops_cli.sources import MakeSource, made_source, parse_options


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    operation: Annotated[str, typer.Argument(help="Name of the operation, or distribution:operation.")] = "auto",
    batch: Annotated[int, typer.Option("-B", "--batch", help="B", min=1)] = 1,
    query_length: Annotated[int, typer.Option("-T", "--query-length", help="T, in tokens.", min=1)] = 1024,
    key_length: Annotated[
        int | None, typer.Option("-S", "--key-length", help="S, in tokens.", show_default="T", min=1)
    ] = None,
    heads: Annotated[int, typer.Option("-H", "--heads", help="H", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option("-K", "--kv-heads", help="K, a divisor of H.", show_default="H", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option("-D", "--head-dim", help="D", min=1)] = 64,
    value_head_dim: Annotated[int | None, typer.Option(help="Dv", show_default="D", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Of query, key, value and bias.")] = "float32",
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="train, prefill, decode or insert.", show_default="decode if T is 1, else train; prefill over a source"
        ),
    ] = None,
    mask: Annotated[
        str | None, typer.Option(help='"causal", an expression of attnops.masks, or an array\'s shape: 1x1x128x128.')
    ] = None,
    bias: Annotated[str | None, typer.Option(help="The shape of an array: 1x8x128x128.")] = None,
    soft_cap: Annotated[float | None, typer.Option(help="Soft cap of the scores.")] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of the scores.", show_default="D ** -0.5")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One learnable logit per head.")] = False,
    dropout: Annotated[float, typer.Option(help="Probability of dropout.")] = 0.0,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Ask for the logsumexp.")] = False,
    return_weights: Annotated[bool, typer.Option("--return-weights", help="Ask for the attention weights.")] = False,
    return_max_logits: Annotated[bool, typer.Option("--return-max-logits", help="Ask for the largest scores.")] = False,
    source: Annotated[
        str | None, typer.Option(help="The source of S keys and values per row: PagedCache, for example.")
    ] = None,
    source_options: Annotated[
        str | None, typer.Option(help="Options of the source, separated by commas: page_size=32,codec=int8.")
    ] = None,
    options: Annotated[
        str | None, typer.Option(help="Options of an operation that isn't attention: decay=channel,beta=yes.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="dp=4,tp=2: the axes of a mesh; prints the partition specs of the call.")
    ] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Run kernels in their interpreter.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rather than run the native forward.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every field.")] = False,
) -> None:
    """Say what would run a call of an operation and, for each other implementation, every reason why it can't.

    Imports every distribution; computes nothing. Exits with 1 if nothing can serve the call, with 2 if the call is
    invalid or the operation is unknown.
    """
    find_devices()
    S, K, Dv = key_length or query_length, kv_heads or heads, value_head_dim or head_dim
    shapes = ((batch, query_length, heads, head_dim), (batch, S, K, head_dim), (batch, S, K, Dv))
    try:
        metadata = OperationMetadata(
            platform=platform,
            mode=mode,  # type: ignore[arg-type]
            dropout_prob=dropout,
            interpret=interpret,
            on_unsupported="error" if strict else "native",
        )
        only_attention = {
            "--key-length": key_length, "--bias": bias, "--soft-cap": soft_cap, "--scale": scale, "--sinks": sinks,
            "--dropout": dropout or None, "--return-lse": return_lse, "--return-weights": return_weights,
            "--return-max-logits": return_max_logits, "--source": source, "--source-options": source_options,
            "--mesh": mesh,
        }  # fmt: skip
        sizes = {"B": batch, "T": query_length, "H": heads, "K": K, "D": head_dim, "Dv": Dv}
        request = _other_request(operation, metadata, sizes, _dtype(dtype), mask, options, only_attention) or _request(
            metadata, shapes, _dtype(dtype), mask, bias, heads if sinks else 0,
            made_source(source, source_options, value_head_dim),
            softmax_scale=scale, logits_soft_cap=soft_cap, return_lse=return_lse, return_weights=return_weights,
            return_max_logits=return_max_logits,
        )  # fmt: skip
        on_mesh = contextlib.nullcontext() if mesh is None else use_abstract_mesh(_mesh(mesh))
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr), on_mesh:
            warnings.simplefilter("ignore", PluginWarning)  # the explanation lists these plugins, with the cause
            explanation = explain(request, operation, metadata, shardings=mesh is not None)
    except UnsupportedError as error:
        _print_refusal(request, error, _alternatives(request, metadata), json)
        raise typer.Exit(1) from None
    except (ValueError, PluginError) as error:
        fail(error, 2)
    if json:
        print_json(_describe(explanation))
    else:
        print_text(str(explanation))
        kernels = FOR_PLATFORM.get(request.platform)
        if kernels and not any(plugin.distribution == kernels for plugin in OperationRegistry.plugins()):
            print_text(f"{kernels} has kernels for {request.platform}: pip install {kernels}")


def _other_request(
    operation: str, metadata: OperationMetadata, sizes: dict[str, int], dtype: Any, mask: str | None,
    options: str | None, only_attention: dict[str, Any],
) -> Request | None:  # fmt: skip
    """The request that the method ``described`` of an operation of another contract than attention makes.

    None for attention, and for a class without such a method.

    Raises:
        ValueError: an option is given that only attention has, or ``options`` for attention, which has none.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore", PluginWarning)
        cls: Any = OperationRegistry.get(operation, find_platform(metadata.platform, None, ()))
    if not hasattr(cls, "described"):
        if options is not None:
            raise ValueError(f"--options={options!r} is for operations that aren't attention, but {operation} has none")
        return None
    if unread := [name for name, value in only_attention.items() if value is not None and value is not False]:
        raise ValueError(f"{unread[0]} is an option of attention, which {operation} does not compute: leave it out")
    given = parse_options("--options", options)
    requests: list[Request] = []
    jax.eval_shape(
        lambda: requests.append(
            cls(metadata).described(sizes, dtype, None if mask is None else parse_mask(mask), given)
        )
    )
    return requests[0]


def _request(
    metadata: OperationMetadata,
    shapes: tuple[tuple[int, ...], ...],
    dtype: Any,
    mask: str | None,
    bias: str | None,
    sinks: int,
    make: MakeSource | None,
    **options: Any,
) -> AttentionRequest:
    """The request of a call with these options. It is traced, so that no array of these shapes is made."""
    requests: list[AttentionRequest] = []

    def call() -> None:
        query, key, value = (jnp.zeros(shape, dtype) for shape in shapes)
        arguments: tuple[Any, ...] = (query, key, value)
        if make is not None:
            query, source, source_options = make(query, key)
            arguments = query, source
            options.update(source_options)
        request = VanillaAttention(metadata).request(
            *arguments,
            mask=None if mask is None else parse_mask(mask),
            bias=None if bias is None else jnp.zeros(parse_shape("bias", bias), dtype),
            sinks=jnp.zeros(sinks) if sinks else None,
            dropout_key=jax.random.key(0) if metadata.dropout_prob else None,
            **options,
        )
        assert isinstance(request, AttentionRequest)
        requests.append(request)

    jax.eval_shape(call)
    return requests[0]


def _mesh(text: str) -> AbstractMesh:
    try:
        axes = {name.strip(): int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    except ValueError:
        axes = {}
    if not all(name and size > 0 for name, size in axes.items()) or not axes:
        raise ValueError(f"mesh={text!r} must be the names and sizes of its axes, such as dp=4,tp=2")
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def _dtype(name: str) -> Any:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"dtype={name!r} is unknown; use float32, bfloat16 or float16") from None
    if dtype == jnp.float64:  # without jax_enable_x64 it would become float32
        raise ValueError("dtype='float64', but must be float32, bfloat16 or float16")
    return dtype


def _alternatives(request: Request, metadata: OperationMetadata) -> tuple[Candidate, ...]:
    """All operations with their reasons, in `auto`'s order, for a request that the named operation refuses."""
    if not isinstance(request, AttentionRequest):
        return ()
    try:
        explanation = explain(request, "auto", metadata)
    except UnsupportedError:
        return ()  # the error already has the reasons of all, or there is no other operation
    return (explanation.chosen, *explanation.others)


def _print_refusal(request: Request, error: UnsupportedError, others: tuple[Candidate, ...], json: bool) -> None:
    sentence = str(error).partition("\n")[0].rstrip(":")
    if json:
        print_json(
            {
                "request": _request_fields(request),
                "chosen": None,
                "others": [_candidate(other) for other in others],
                "error": sentence,
                "reasons": [_reason(reason) for reason in error.reasons],
            }
        )
    else:
        able = [
            f"{other.name}: could serve it\n  {other.ranked}" for other in others if other.serves and not other.inherits
        ]
        print_text("\n".join([sentence, *(f"  - {reason}" for reason in error.reasons), *able]))


def _describe(explanation: Explanation) -> dict[str, Any]:
    names = ("query", "key", "value", "output", "logsumexp")
    specs = explanation.shardings
    return {
        "request": _request_fields(explanation.request),
        "chosen": _candidate(explanation.chosen),
        "others": [_candidate(other) for other in explanation.others],
        "shardings": None if specs is None else {name: list(getattr(specs, name)) for name in names},
        "error": None,
        "reasons": [],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    fields = {field.name: getattr(candidate, field.name) for field in dataclasses.fields(candidate)}
    rank = candidate.rank
    return fields | {
        "serves": candidate.serves,
        "reasons": [_reason(reason) for reason in candidate.reasons],
        "source_use": None if (use := candidate.source_use) is None else {"reads": use.reads, "steps": use.steps},
        "rank": None if rank is None else {"name": rank.name, "place": rank.place, "reason": rank.reason},
    }


def _request_fields(request: Request) -> dict[str, Any]:
    return dataclasses.asdict(request) | {"mode": printed_mode(request.mode)}


def _reason(reason: Reason) -> dict[str, str]:
    return {
        "argument": reason.argument,
        "value": reason.text,
        "limit": reason.limit,
        "hint": reason.hint,
    }
