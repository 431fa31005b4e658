"""What libraries print to the file descriptor of stderr does not drown the answer, and is there where it is needed."""

import os
import sys

import jax
import pytest

from attnops import OperationRegistry
from attnops_cli.noise import find_devices, quiet

PLUGIN = """
import os
os.write(2, b"E0000 no accelerator\\n")
{more}
from attnops.operations.vanilla import VanillaAttention

class Noisy(VanillaAttention):
    api_version = 2

    @classmethod
    def get_impl_name(cls):
        return "noisy"
"""


def noise():
    os.write(2, b"E0000 noise\n")


def fail_with_noise():
    noise()
    raise ValueError("x")


def test_it_is_dropped_where_all_is_well(capfd):
    with quiet():
        noise()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_it_is_shown_where_something_fails_or_it_is_asked_for(capfd):
    with pytest.raises(ValueError, match="x"), quiet():
        fail_with_noise()
    assert capfd.readouterr().err == "E0000 noise\n"
    for verbose, asked in ((True, False), (False, True)):
        with quiet(verbose) as kept:
            noise()
            if asked:
                kept.show()
        assert capfd.readouterr().err == "E0000 noise\n"


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    """A function that installs a distribution whose module prints when it is imported, and then runs more."""

    def install(more=""):
        (tmp_path / "acme_noise.py").write_text(PLUGIN.format(more=more))
        info = tmp_path / "acme_noise-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-noise\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[attnops.operations]\nnoisy = acme_noise:Noisy\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("acme_noise", None)
    monkeypatch.undo()
    OperationRegistry.refresh()


@pytest.mark.parametrize(("options", "more", "shown"), [
    ((), "", False),
    (("-v",), "", True),
    ((), "raise OSError('libacme.so')", True),
])  # fmt: skip
def test_list_shows_what_a_plugin_prints_if_it_fails_or_if_asked(noisy, run, capfd, options, more, shown):
    noisy(more)
    result = run("list", *options)
    assert result.exit_code == 0
    assert ("failed: importing acme_noise:Noisy raised OSError" in result.stdout) is bool(more)
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("noisy "))
    assert row[-3:] == ["acme-noise", "1.0", "failed" if more else "loaded"]
    assert ("E0000 no accelerator" in capfd.readouterr().err) is shown


@pytest.mark.parametrize("fails", [False, True])
def test_looking_for_devices_is_quiet_unless_it_fails(monkeypatch, capfd, fails):
    def devices():
        noise()
        if fails:
            raise RuntimeError("no devices")

    monkeypatch.setattr(jax, "devices", devices)
    find_devices()
    assert capfd.readouterr().err == ("E0000 noise\n" if fails else "")
