"""What operations answer to small requests: faults of their classes, and why they can't serve this machine."""

from __future__ import annotations

import warnings

from attnops.dispatch import border
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.explain import explain
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.plugins import Plugin
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import PluginError, PluginWarning, Reason, UnsupportedError, pass_interrupt, printable


def find_faults(plugin: Plugin) -> list[str]:
    """Faults of a loaded class's methods, called with a small request on each platform; runs no forward."""
    cls = plugin.operation_class
    faults: dict[str, None] = {}
    for platform in PLATFORMS:
        try:
            if cls is not None:
                _ask_all(cls, platform)
        except PluginError as error:
            faults[str(error)] = None
        except BaseException as error:
            pass_interrupt(error)
            faults[f"asking it raised {type(error).__name__}: {printable(error)}"] = None
    return list(faults)


def find_reasons(plugin: Plugin, platform: str) -> list[Reason]:
    """Why a loaded class can't serve plain attention in bfloat16 on a platform; empty if it can, or is at fault."""
    cls = plugin.operation_class
    if cls is None or not issubclass(cls, OperationImpl):
        return []
    try:
        return border.make(cls, OperationMetadata(platform=platform)).reasons(_small_request(platform))
    except BaseException as error:  # `find_faults` reports it
        pass_interrupt(error)
        return []


def find_chosen(platform: str) -> str:
    """The name and forward that `auto` runs on a platform, for plain attention of 4,096 tokens, bfloat16, D 128."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        try:
            chosen = explain(_long_request(platform)).chosen
        except (ValueError, PluginError) as error:
            return f"nothing: {error}"
    return f"{chosen.name} (forward_{chosen.forward})"


def find_details(plugin: Plugin, platform: str) -> tuple[str, ...]:
    """How a loaded class serves the call of `find_chosen`, such as its tile sizes; empty if it does not."""
    cls = plugin.operation_class
    if cls is None or not issubclass(cls, OperationImpl):
        return ()
    request = _long_request(platform)
    try:
        operation = border.make(cls, OperationMetadata(platform=platform))
        return () if operation.reasons(request) else border.details(operation, request)
    except BaseException as error:  # `find_faults` reports it
        pass_interrupt(error)
        return ()


def _ask_all(cls: type[BaseOperation], platform: str) -> None:
    try:
        operation = border.make(cls, OperationMetadata(platform=platform))
    except (ValueError, UnsupportedError):
        return  # a class may refuse the metadata
    if not issubclass(cls, OperationImpl):
        operation.reasons(Request(platform=platform))
    else:
        request = _small_request(platform)
        border.rank(cls, request)
        if not operation.reasons(request):
            border.details(operation, request)
    border.environment_key(operation)


def _long_request(platform: str) -> AttentionRequest:
    return _small_request(platform).replace(query_length=4096, key_length=4096, head_dim=128, value_head_dim=128)


def _small_request(platform: str) -> AttentionRequest:
    return AttentionRequest(
        platform=platform, batch=1, query_length=128, key_length=128, heads=2, kv_heads=2, head_dim=64,
        value_head_dim=64, dtypes=("bfloat16",) * 3,
    )  # fmt: skip
