"""Random calls of linear attention notice mistakes in its kernel: each is planted in its source."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
COMPILER: Final = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "c++"
pytestmark = pytest.mark.slow
MISTAKES: Final = {
    "decays are summed in one float32": ("low[i] = (float)(sum - high[i])", "low[i] = 0"),
    "a token's decay is left out": ("else sum += decay;", "else sum += t0 ? 0 : decay;"),
    "a reset keeps what it does not see": ("load_i(resets + j) == resets[i]", "load_i(resets + j) <= resets[i]"),
    "a reset keeps the state": ("(vi)(of_token == 0)", "(vi)(of_token >= 0)"),
    "the end has no resets": ("(vi)(of_token == count)", "(vi)(of_token <= count)"),
    "a decay of minus infinity is no reset": ("decay < EMPTIES", "decay < 0 && decay < -INFINITY"),
    "a token sees the next one": ("lane + j <= i", "lane + j <= i + 1"),
    "beta is left out of the system": ("decay * splat(-beta[i])", "decay * splat(-1.0f)"),
    "the delta rule does not ask the state": ("- load(u + c) * splat(gates.kept[i])", "- 0.0f * load(u + c)"),
    "the substitution forgets a row": ("for (int s = 0; s < ROWS; ++s)", "for (int s = 1; s < ROWS; ++s)"),
    "blocks are solved alone": ("add_block(system, i, i, u, u);", "add_block(system, i, 0, u, u);"),
    "the last block is left out": ("add_block(m.weights, i, i + 1, u, o)", "add_block(m.weights, i, i, u, o)"),
    "the state does not decay": ("if (whole != 1.0f)", "if (whole != whole)"),
    "updates do not decay": ("load(u + c) * splat(gates.to_end[i])", "load(u + c)"),
    "padding is a token": ("i < n && (!call.is_token || call.is_token[t]);", "i < n;"),
    "heads share decays": ("if (c0 == 0 || p == first)", "if (p == first)"),
    "key heads are those of another group": ("pair / call.K, pair % call.K, first", "pair / call.K, 0 * pair, first"),
    "the scale is left out": ("columns, call.scale);", "columns, 1.0f);"),
    "a panel's columns are the first ones": ("* call.Dv + c0 : nullptr", "* call.Dv : nullptr"),
}  # fmt: skip


def found_by(folder: Path, old: str, new: str) -> int:
    """The exit status of random calls of a kernel with a mistake: 1 if they notice it."""
    changed = 0
    for name in ("linear.inc", "linear_gates.inc"):
        text = (ROOT / "native" / name).read_text()
        changed += text.count(old)
        (folder / name).write_text(text.replace(old, new))
    assert changed, f"the kernel has no {old!r}"
    program = folder / "mutant"
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
         "-DATTNOPS_ISA=baseline", "-DATTNOPS_LINEAR_ALONE", f"-I{folder}", f"-I{ROOT / 'native'}",
         ROOT / "tests/native/fuzz.cc", ROOT / "native/memory.cc", "-pthread", "-o", program], check=True,
    )  # fmt: skip
    return subprocess.run([program, "linear", "300", "7"], capture_output=True, check=False).returncode


def test_without_a_mistake_calls_are_right(tmp_path: Path) -> None:
    assert found_by(tmp_path, "call.scale", "call.scale") == 0


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.tier(every=2)
def test_a_mistake_is_noticed(mistake: str, tmp_path: Path) -> None:
    assert found_by(tmp_path, *MISTAKES[mistake]) == 1
