"""The README's table: which operation serves which feature on which platform. It asks operations; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import ATTENTION, BaseOperation
from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Request
from attnops.masks import MaskStructure
from attnops.sharding import MODE_DECODE
from attnops_caches import CacheRequest, in_place_reasons
from attnops_caches.codec import LARGEST, SCALES

# A call that every implementation should serve; each row changes it.
PLAIN: Final[dict[str, Any]] = {
    "batch": 2, "query_length": 1024, "key_length": 1024, "heads": 8, "kv_heads": 8, "head_dim": 64,
    "value_head_dim": 64, "dtypes": ("bfloat16",) * 3,
}  # fmt: skip

STORAGES: Final = ("DenseCache", "WindowCache", "PagedCache")

ROWS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {},
    "float16": {"dtypes": ("float16",) * 3},
    "float32": {"dtypes": ("float32",) * 3},
    "GQA and MQA": {"kv_heads": 2},
    "T ≠ S": {"query_length": 256},
    "odd lengths": {"query_length": 1023, "key_length": 1023},
    "D ≠ Dv": {"head_dim": 64, "value_head_dim": 32},
    "head_dim 80": {"head_dim": 80, "value_head_dim": 80},
    "head_dim 256": {"head_dim": 256, "value_head_dim": 256},
    "head dims 576/512 (MLA)": {"kv_heads": 1, "head_dim": 576, "value_head_dim": 512},
    "array mask": {"mask": "Dense", "mask_kinds": frozenset({"Dense"}), "mask_shape": (2, 1, 1024, 1024)},
    "chosen blocks (`Blocks`)": {"mask": "Blocks", "mask_kinds": frozenset({"Blocks"})},
    "`Causal`": {
        "mask": "Causal()",
        "mask_kinds": frozenset({"Causal"}),
        "mask_structure": MaskStructure(band=(0, None)),
    },
    "windows, chunks, prefixes": {"mask": "…", "mask_kinds": frozenset({"SlidingWindow", "Chunked", "PrefixLM", "|"})},
    "segments, lengths, padding, trees of drafts": {
        "mask": "…",
        "mask_kinds": frozenset({"Segments", "Lengths", "KeyPadding", "Ancestors", "&"}),
    },
    "`MaskFn`, `~`, positions": {"mask": "…", "mask_kinds": frozenset({"MaskFn", "~", "at"})},
    "total-token layout": {"batch": 1, "mask": "…", "mask_kinds": frozenset({"Causal", "at", "Segments", "&"})},
    "array bias": {"bias_kind": "array", "bias_shape": (1, 8, 1024, 1024), "bias_dtype": "bfloat16"},
    "`ALiBi`, `RelativePosition`": {"bias_kind": "RelativePosition"},
    "`ScoreFn`": {"bias_kind": "ScoreFn"},
    "softmax_scale": {"softmax_scale": 0.1},
    "soft cap": {"logits_soft_cap": 30.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout_prob": 0.1, "options": frozenset({"dropout_key"})},
    "logsumexp": {"return_lse": True},
    "weights": {"return_weights": True},
    "max logits": {"return_max_logits": True},
}


def _codecs(*dtypes: str) -> tuple[dict[str, Any], ...]:
    return tuple({"codec": dtype, "scales": scales} for dtype in dtypes for scales in SCALES)


# For a row about caches: storages and descriptions. A row is served if some storage is served with all descriptions.
CACHES: Final[dict[str, tuple[tuple[str, ...], tuple[dict[str, Any], ...]]]] = {
    "`DenseCache`": (("DenseCache",), ({},)),
    "`WindowCache`": (("WindowCache",), ({},)),
    "`PagedCache`": (("PagedCache",), ({},)),
    "caches in int8, e4m3, e5m2": (STORAGES, _codecs(*LARGEST.keys() - {"int4"})),
    "caches in int4": (STORAGES, tuple(codec | {"joined": True, "width": 256} for codec in _codecs("int4"))),
    "latent caches (MLA)": (STORAGES, ({"latent": True},)),
    "packed rows over a cache": (STORAGES, ({"is_packed": True},)),
}  # fmt: skip

_OPTIONS = {
    "mask": "mask",
    "bias": "bias_kind",
    "softmax_scale": "softmax_scale",
    "logits_soft_cap": "logits_soft_cap",
    "sinks": "sinks",
    "return_lse": "return_lse",
    "return_weights": "return_weights",
    "return_max_logits": "return_max_logits",
}


def row_request(feature: str, platform: str) -> AttentionRequest:
    """The request of one row, in train mode, which includes the backward pass."""
    fields = PLAIN | ROWS[feature]
    options = {option for option, field in _OPTIONS.items() if fields.get(field)}
    fields["options"] = frozenset(options) | fields.get("options", frozenset())
    return AttentionRequest(platform=platform, **fields)


def support(operation: type[OperationImpl], feature: str, platform: str) -> str:
    """How an operation serves a feature on a platform, in train mode.

    Returns:
        "kernel" (the platform's own forward), "native" (the native forward, by design or instead of the platform's),
        or "refused".
    """
    forward = forward_for(operation, platform)
    op = operation(OperationMetadata(platform=platform))
    request = row_request(feature, platform)
    if any(reason.argument == "mesh" for reason in op.reasons(request)):
        request = request.replace(sequence_axes=("sp",))  # an operation for sequences sharded over a mesh
    if forward != "native" and not op.reasons(request):
        return "kernel"
    return "refused" if op.reasons_for("native", request) else "native"


def cache_support(operation: type[OperationImpl], feature: str, platform: str) -> str:
    """How an operation serves a call over a cache on a platform, in decode mode.

    Returns:
        "kernel" or "native" (the platform's own forward or the native one reads the cache in place), "read" (one of
        them is given the arrays of ``cache.read()``), or "refused".
    """
    storages, descriptions = CACHES[feature]
    order = ("kernel", "native", "read", "refused")
    return min(
        (
            max((_cache_support(operation, platform, storage, fields) for fields in descriptions), key=order.index)
            for storage in storages
        ),
        key=order.index,
    )


def _cache_support(operation: type[OperationImpl], platform: str, storage: str, described: dict[str, Any]) -> str:
    op = operation(OperationMetadata(platform=platform))
    fields = PLAIN | {"query_length": 1, "kv_heads": 2, "head_dim": 128, "value_head_dim": 128}
    if described.get("latent"):
        fields |= {"kv_heads": 1, "head_dim": 576, "value_head_dim": 512}
    if described.get("is_packed"):
        fields |= {"batch": 1, "query_length": 8, "key_length": 2 * 1024}
    request = AttentionRequest(
        platform=platform, mode=MODE_DECODE, mask="…", mask_kinds=frozenset({"Causal", "at", "Segments", "&"}),
        options=frozenset({"mask"}),
        source=CacheRequest(storage, page_size=16 if storage == "PagedCache" else 0, **described), **fields,
    )  # fmt: skip
    forwards = [
        forward for forward in (forward_for(operation, platform), "native") if not op.reasons_for(forward, request)
    ]
    if not forwards:
        return "refused"
    if in_place_reasons(op, forwards[0], request):
        return "read"
    return "native" if forwards[0] == "native" else "kernel"


def markdown_table() -> str:
    """Features by installed operation and platform, in GitHub's Markdown."""
    names = [name for name in OperationRegistry.list_implementations() if name != "auto"]

    def cells(cls: type[BaseOperation], platform: str) -> list[str]:
        if not issubclass(cls, OperationImpl) or cls.computes != ATTENTION:
            return []
        found = [support(cls, feature, platform) for feature in ROWS]
        return found + [cache_support(cls, feature, platform) for feature in CACHES]

    return columns_table(names, [*ROWS, *CACHES], cells)


def contract_table(names: list[str], requests: Mapping[str, Request]) -> str:
    """The table of operations of another contract than attention.

    Args:
        names: of the operations.
        requests: by feature, a request.
    """

    def cells(cls: type[BaseOperation], platform: str) -> list[str]:
        op, forward = cls(OperationMetadata(platform=platform)), forward_for(cls, platform)
        asked = [request.replace(platform=platform) for request in requests.values()]
        return [
            "kernel"
            if forward != "native" and not op.reasons(request)
            else "refused"
            if op.reasons_for("native", request)
            else "native"
            for request in asked
        ]

    return columns_table(names, list(requests), cells)


def columns_table(
    names: list[str], features: list[str], cells_of: Callable[[type[BaseOperation], str], list[str]]
) -> str:
    """Features by operation and platform, of the cells of each; no column for an operation without cells."""
    columns: dict[str, list[str]] = {}
    for name in names:
        found = {platform: tuple(cells_of(OperationRegistry.get(name, platform), platform)) for platform in PLATFORMS}
        by_platform = {platform: cells for platform, cells in found.items() if cells}
        # Platforms with equal cells share a column.
        for column in dict.fromkeys(by_platform.values()):
            where = ", ".join(platform for platform, cells in by_platform.items() if cells == column)
            columns[f"`{name}` {'everywhere' if len(where.split(', ')) == len(PLATFORMS) else where}"] = list(column)
    symbols = {"kernel": "●", "native": "○", "read": "◌", "refused": "–"}
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + ":-:|" * len(columns)]
    for row, feature in enumerate(features):
        lines.append(f"| {feature} | " + " | ".join(symbols[cells[row]] for cells in columns.values()) + " |")
    return "\n".join(lines)
