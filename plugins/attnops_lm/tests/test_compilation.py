"""Where compiled programs are kept."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from attnops_lm import compilation, demo
from attnops_lm.compilation import VARIABLE, default_folder, keep_programs

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def without_a_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of one device in which nobody has set a cache; tests have both."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update(NAMES[0], None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_in_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / "attnops" / "programs"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "variable"))
    for folder, expected in ((str(tmp_path / "given"), "given"), (None, "variable")):
        jax.config.update(NAMES[0], None)
        path = keep_programs(folder)
        assert path is not None
        assert path.parent == tmp_path / expected
        assert path.is_dir()
        assert getattr(jax.config, NAMES[0]) == str(path)
        assert keep_programs("another") == path  # the first stays, as a user's own does
    monkeypatch.delenv(VARIABLE)
    jax.config.update(NAMES[0], None)
    path = keep_programs()
    assert path is not None
    assert path.parent == default_folder()


def test_nothing_is_kept_if_it_is_off_or_can_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep_programs("off") is None
    monkeypatch.setenv(VARIABLE, "off")
    assert keep_programs() is None
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no compiled program is kept in .*name another folder, or 'off'"):
        assert keep_programs(str(tmp_path / "file")) is None
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert keep_programs(str(tmp_path)) is None
    assert getattr(jax.config, NAMES[0]) is None


def test_kinds_of_processors_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compilation._processor()
    assert own == compilation._processor()
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(compilation.platform, "processor", lambda: "another")
    assert compilation._processor() != own


def test_the_demo_keeps_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[None] = []
    monkeypatch.setattr(demo, "keep_programs", lambda: kept.append(None))
    assert demo.run(Console(file=io.StringIO()), []) == 1  # no operation ran
    assert kept == [None]


@pytest.mark.slow
def test_a_program_that_was_kept_is_not_compiled_again(tmp_path: Path) -> None:
    assert keep_programs(str(tmp_path)) is not None
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

    def run() -> int:
        jax.clear_caches()
        hits.clear()
        jax.jit(lambda x: x * 3 + 1)(2.0)
        return hits.count("/jax/compilation_cache/cache_hits")

    assert (run(), run()) == (0, 1)
