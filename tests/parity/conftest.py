"""What several tests of transformers' models ask of the adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnops.masks import Mask
from attnops_adapters import torch_call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The kinds of the masks that layers attend with, but for what hides padded keys."""
    found: list[set[str]] = []
    run = torch_call.run

    def counted(call: Any, tensors: Any, mask: Mask, seed: int | None = None) -> torch.Tensor:
        found.append(set(mask.kinds() - {"&", "Lengths"}))
        return run(call, tensors, mask, seed)

    for module in ("attnops_adapters.transformers", "transformers_models"):
        monkeypatch.setattr(f"{module}.run", counted)
    return found
