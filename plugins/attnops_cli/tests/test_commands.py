"""Commands are found by entry points, imported when they run, and one that can't be used harms no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnops_cli import commands

Install = Callable[..., None]
SOURCE = """
import typer

def command(word: str = "nothing") -> None:
    \"\"\"Say a word.\"\"\"
    typer.echo(f"said {word}")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a distribution with a command ``zeta`` of a module, and gives the module's text."""
    names = []

    def install(name: str, text: str = SOURCE, command: str = "zeta", metadata: str | None = None) -> None:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        written = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" if metadata is None else metadata
        (info / "METADATA").write_text(written)
        (info / "entry_points.txt").write_text(f"[attnops.commands]\n{command} = {name}:command\n")
        monkeypatch.syspath_prepend(str(folder))
        names.append(name)

    yield install
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution but attnops-cli has commands."""
    everything = commands.installed()
    mine = {name: owners for name, owners in everything.items() if "attnops-cli" in owners}
    assert list(mine) == ["doctor", "explain", "list", "show"]
    monkeypatch.setattr(commands, "installed", lambda: mine)


def test_a_distributions_command_runs_and_is_imported_when_it_does(install: Install, run: Any) -> None:
    install("acme_one")
    assert run("show", "causal").exit_code == 0
    assert "acme_one" not in sys.modules
    assert "zeta" in run("--help").stdout
    assert "Say a word." in run("zeta", "--help").stdout
    result = run("zeta", "--word", "more")
    assert (result.exit_code, result.stdout) == (0, "said more\n")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise OSError('libacme.so.2')", "OSError: libacme.so.2"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: "),
        ("command = 3", "TypeError: 3 is not a callable object"),
    ],
)
def test_one_that_cannot_be_used_is_told_of_and_harms_no_other(
    install: Install, run: Any, text: str, cause: str
) -> None:
    install("acme_one", text)
    result = run("zeta", "--word", "more")
    assert (result.exit_code, result.stdout) == (2, "")
    said = f"attnops: attnops zeta is a command of acme-one that can't be used: acme_one:command raised {cause}"
    assert result.stderr.startswith(said)
    assert result.stderr.endswith("; install acme-one again, or see python -c 'import acme_one'\n")
    shown = run("--help")
    assert shown.exit_code == 0
    assert "can't be used" in " ".join(shown.stdout.split())
    assert run("list", "--no-load").exit_code == 0


def test_a_name_of_two_distributions_names_both(install: Install, run: Any) -> None:
    install("acme_one")
    install("acme_two")
    result = run("zeta")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "attnops: 'zeta' is a command of acme-one and of acme-two: uninstall all but one of them\n"
    )
    install("acme_three", command="show")
    assert "'show' is a command of acme-three and of attnops-cli" in run("show", "causal").stderr
    assert run("list", "--no-load").exit_code == 0


def test_broken_metadata_hides_no_other_command(install: Install, run: Any) -> None:
    install("acme_one")
    install("acme_two", metadata="")
    assert run("zeta").stdout == "said nothing\n"


@pytest.mark.usefixtures("own_commands")
def test_what_is_not_installed_is_answered_with_its_distribution(run: Any) -> None:
    for name, distribution in commands.HOMES.items():
        result = run(name, "--help")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"attnops: attnops {name} is a command of {distribution}: pip install {distribution}\n"


@pytest.mark.usefixtures("own_commands")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lst", "did you mean list?"),
        ("chek", "did you mean check (pip install attnops-testing)?"),
        ("abacus", "there are doctor, explain, list, show"),
    ],
)
def test_an_unknown_name_is_answered_with_the_near_one(run: Any, name: str, said: str) -> None:
    result = run(name)
    assert (result.exit_code, result.stderr) == (2, f"attnops: there is no command {name!r}; {said}\n")
