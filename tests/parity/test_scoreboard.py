"""Scripts that show what is said of PyTorch and transformers, in the versions that `make parity` has."""

from __future__ import annotations

from repros import check


def test_each_script_shows_what_it_says() -> None:
    assert check("torch", "transformers")
