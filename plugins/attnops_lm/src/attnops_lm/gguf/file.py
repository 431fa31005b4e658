"""A GGUF file, or the parts of one: its fields and its tensors."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama.cpp's gguf-split names parts


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """What is in a file. Tensors are mapped, not read.

    Attributes:
        path: the file, or the first of its parts.
        fields: values by name, of the first part.
        tensors: by name, of all parts.
        used: names of tensors that were read.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, gguf.ReaderTensor]
    used: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Open a file, or all parts of a split one by its first part.

        Raises:
            FileNotFoundError: a part is missing.
            ValueError: it is no GGUF file, or a later part, or the parts do not fit together.
        """
        reader = _read(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        if (count := int(fields.get("split.count", 0))) > 1:
            for number, part in enumerate(_parts(path, int(fields["split.no"]), count)[1:], start=1):
                tensors |= _part(part, number, count)
            if len(tensors) != (wanted := fields.get("split.tensors.count", len(tensors))):
                raise ValueError(f"{path} and its other parts have {len(tensors)} tensors, but must have {wanted}")
        return cls(path, fields, tensors)

    @functools.cached_property
    def architecture(self) -> str:
        """The name of the architecture; `ValueError` if there is none."""
        return str(required(self.fields, "general.architecture"))

    def read(self, name: str, part: int | slice = slice(None)) -> np.ndarray:
        """The values of a tensor in float32, or a part of them along the first axis.

        Raises:
            ValueError: there is no such tensor, gguf can't convert its type, or a value is not finite.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}, which the architecture {self.architecture} needs")
        self.used.add(name)
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data[part], tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: gguf can't convert {name}, {tensor.tensor_type.name}: {error}") from error
        except IndexError as error:
            raise ValueError(f"{self.path}: {name} has shape {tensor.data.shape}: {error}") from error
        if not np.isfinite(values).all():
            raise ValueError(f"{self.path}: {name} has NaN or infinite values: the file is damaged, fetch it again")
        return values


class _Reader(gguf.GGUFReader):
    """gguf's, which reads past the end of a file: an array whose length is damaged would take for ever."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, but byte {end} is needed")
        return super()._get(offset, dtype, count, override_order)


def _read(path: Path) -> gguf.GGUFReader:
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is no whole GGUF file: {error}") from error


def required(fields: Mapping[str, Any], name: str) -> Any:
    """A field of a GGUF file; `ValueError` if it has none of this name."""
    if name not in fields:
        raise ValueError(f"the GGUF file has no field {name}, which is needed")
    return fields[name]


def _parts(path: Path, number: int, count: int) -> list[Path]:
    named = _PART.fullmatch(path.name)
    if number != 0 or named is None or (int(named[2]), int(named[3])) != (1, count):
        raise ValueError(
            f"{path} is part {number + 1} of {count}: give the first one, named …-00001-of-{count:05d}.gguf beside the "
            f"others, or join them by llama-gguf-split --merge FIRST WHOLE"
        )
    parts = [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise FileNotFoundError(f"{path} is the first of {count} parts, but {', '.join(missing)} are not beside it")
    return parts


def _part(path: Path, number: int, count: int) -> dict[str, gguf.ReaderTensor]:
    reader = _read(path)
    found = tuple(int(reader.fields[f"split.{x}"].contents()) if f"split.{x}" in reader.fields else None
                  for x in ("no", "count"))  # fmt: skip
    if found != (number, count):
        raise ValueError(f"{path} has split.no and split.count {found}, but must have {(number, count)}")
    return {tensor.name: tensor for tensor in reader.tensors}
