"""The notebooks' cells run on a CPU, and what they say of a T4 is what the code says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from attnops.operations import sdpa

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))


def run(path: Path, *, without: tuple[str, ...] = (), until: str = "") -> dict[str, Any]:
    """Run the cells without these tags, up to the one that contains ``until``; the names that they define."""
    names: dict[str, Any] = {"__name__": path.name}
    for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not {"install", *without} & set(cell["metadata"].get("tags", ())):
            exec(compile(source, f"{path.name}, cell {i}", "exec"), names)
            if until and until in source:
                break
    return names


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # The cells that prove are alike, and one of them runs.
    names = run(path, without=() if path.stem == "cpu" else ("prove",))
    printed = capsys.readouterr().out
    assert "runs attnops" in printed
    assert names["last"] < names["first"]
    assert names["cache"].lengths.tolist() == [40]
    if path.stem == "cpu":
        assert "5 right" in (tmp_path / "attnops-prove.md").read_text()


@pytest.mark.slow
def test_a_t4_is_refused_with_the_reasons_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (path for path in NOTEBOOKS if "t4" in path.stem)
    has_triton = importlib.util.find_spec("attnops_triton") is not None
    if has_triton:
        monkeypatch.setattr("attnops_triton.language.compat.device_arch", lambda: "sm_75")
    monkeypatch.setattr(sdpa, "_capability", lambda: 7.5)
    run(path, until="explain")
    printed = capsys.readouterr().out
    assert printed.count("GPU=sm_75: must be at least sm_80") == 1 + has_triton
    assert "runs attnops:flash (forward_native)" in printed
    text = path.read_text(encoding="utf-8")
    assert "`GPU=sm_75: must be at least sm_80`" in text
    assert "`runs attnops:flash (forward_native)`" in text


def test_notebooks_have_no_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], path.name
        assert [cell["metadata"]["tags"] for cell in cells if "tags" in cell["metadata"]] == [["install"], ["prove"]]
