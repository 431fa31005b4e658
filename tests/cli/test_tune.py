"""`attnops tune`: a plugin tunes, or says that it has nothing to tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_the_options_reach_the_operation(run: Any, register: Any, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    register("forward_gpu", tune=staticmethod(lambda **options: given.append(options) or options["report"]("tuned")))
    path = tmp_path / "t.json"
    result = run("tune", "zeta", "--platform", "cuda", "-D", "96", "--length", "512", "--output", str(path))
    assert (result.exit_code, result.output) == (0, "tuned\n")
    (options,) = given
    assert options.pop("report")
    assert options == {
        "dtypes": ["bfloat16"], "head_dims": [96], "lengths": [512], "masks": ["full", "causal"],
        "output": path, "merge": [], "dry": "",
    }  # fmt: skip


def test_an_operation_without_tile_sizes_is_an_error(run: Any) -> None:
    result = run("tune", "vanilla", "--platform", "cpu")
    assert result.exit_code == 2
    assert "VanillaAttention has no tile sizes to tune" in result.output + (result.stderr or "")


def test_an_unknown_mask_is_an_error(run: Any) -> None:
    result = run("tune", "vanilla", "--platform", "cpu", "--mask", "window")
    assert result.exit_code == 2
    assert "mask='window' must be one of ['full', 'causal']" in result.output + (result.stderr or "")
