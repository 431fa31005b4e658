"""Tables of measured times: the fastest tile sizes and the fastest operation on a device.

`attnops tune` writes such tables; ``$ATTNOPS_TRITON_TUNED`` names the files to read, joined by ``:``. A table is JSON
with one row per line, sorted, so that two tables can be compared and merged as text. Nothing is measured while a model
runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

VARIABLE: Final = "ATTNOPS_TRITON_TUNED"
FORMAT: Final = 1


@dataclasses.dataclass(frozen=True, order=True)
class MeasuredTime:
    """A measured time.

    Attributes:
        device: JAX's name of the device, such as ``"NVIDIA H100 80GB HBM3"``.
        what: a kernel ("forward", "by_query" or "by_key"), or a call of an operation, such as
            ``"attnops-triton:flash, backward"``.
        dtype: the dtype of query, key and value.
        head_dim: D.
        value_head_dim: Dv.
        mask: "full" or "causal".
        length: T and S.
        tiles: (bq, bk, warps, stages) of a kernel, followed by 1 if it is specialised; empty for a call.
        seconds: the measured time.
    """

    device: str
    what: str
    dtype: str
    head_dim: int
    value_head_dim: int
    mask: str
    length: int
    tiles: tuple[int, ...]
    seconds: float

    @property
    def measured(self) -> tuple[object, ...]:
        """What was measured: all fields except ``tiles`` and ``seconds``."""
        return (
            self.device, self.what, self.dtype, self.head_dim, self.value_head_dim, self.mask, self.length,
        )  # fmt: skip


def merge(rows: Iterable[MeasuredTime]) -> list[MeasuredTime]:
    """The fastest row for each `MeasuredTime.measured`, sorted; the result does not depend on the order of ``rows``."""
    best: dict[tuple[object, ...], MeasuredTime] = {}
    for row in sorted(rows, key=lambda row: (row.seconds, row)):
        best.setdefault(row.measured, row)
    return sorted(best.values())


def write(path: Path, rows: Iterable[MeasuredTime]) -> None:
    """Write a table."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in merge(rows))
    path.write_text(f'{{"format": {FORMAT}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def read(path: Path) -> list[MeasuredTime]:
    """The rows of a table.

    Raises:
        ValueError: the file is not such a table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']}")
        return [MeasuredTime(**row | {"tiles": tuple(row["tiles"])}) for row in table["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} must be a table of format {FORMAT}, as `attnops tune` writes; reading it raised "
            f"{type(error).__name__}: {error}"
        ) from None


def installed() -> tuple[MeasuredTime, ...]:
    """The rows of the tables that ``$ATTNOPS_TRITON_TUNED`` names; files that do not exist are ignored."""
    return _installed(os.environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=4)
def _installed(paths: str) -> tuple[MeasuredTime, ...]:
    files = [Path(path) for path in paths.split(os.pathsep) if path]
    return tuple(merge(row for path in files if path.is_file() for row in read(path)))


def tiles(device: str, kernel: str, dtype: str, head_dim: int, value_head_dim: int) -> tuple[int, ...]:
    """The fastest tiles of a kernel at the longest measured length; empty if the kernel was not measured.

    If both masks were measured at that length, the causal row decides.
    """
    rows = [
        row
        for row in installed()
        if (row.device, row.what, row.dtype, row.head_dim, row.value_head_dim)
        == (device, kernel, dtype, head_dim, value_head_dim)
    ]
    return max(rows, key=lambda row: (row.length, row.mask == "causal")).tiles if rows else ()


def fastest(device: str, calls: tuple[str, ...], dtype: str, head_dim: int, mask: str, length: int) -> str:
    """The fastest of ``calls`` at the measured length nearest to ``length``; empty if there is no such length.

    Only lengths at which all calls were measured are considered, and only within a factor of 2 of ``length``.
    """
    times = {
        (row.length, row.what): row.seconds
        for row in installed()
        if (row.device, row.dtype, row.head_dim, row.value_head_dim, row.mask)
        == (device, dtype, *(head_dim,) * 2, mask)
    }
    lengths = [n for n, _ in times if all((n, call) in times for call in calls) and length / 2 <= n <= 2 * length]
    if not lengths:
        return ""
    nearest = min(lengths, key=lambda n: (abs(math.log(n / length)), n))
    return min(calls, key=lambda call: (times[nearest, call], call))
