"""`attnops list` and `attnops explain` of linear attention, and its table of features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from command_fixtures import run, run_json

import attnops
from attnops import OperationMetadata
from attnops.masks import Segments
from attnops_linear import LinearAttention
from attnops_linear.testing import markdown_table

__all__ = ["run", "run_json"]


def test_list_shows_what_each_computes(run_json: Any) -> None:
    found = {x["operation"]: x["computes"] for x in run_json("list")}
    assert (found["linear_attention"], found["causal_conv1d"]) == ("linear_attention", "causal_conv1d")


def test_explain_asks_what_the_library_asks(run: Any, run_json: Any) -> None:
    arguments = (
        "explain", "linear_attention", "-B", "2", "-T", "8", "-H", "4", "-K", "2", "-D", "16", "--value-head-dim", "24",
        "--dtype", "bfloat16", "--mode", "prefill", "--options", "decay=channel,beta=yes,return_state=yes", "--mask",
        "Segments((8,))", "--platform", "cuda",
    )  # fmt: skip

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    request = LinearAttention(OperationMetadata(platform="cuda", mode="prefill")).request(
        array(2, 8, 2, 16), array(2, 8, 2, 16), array(2, 8, 4, 24), decay=array(2, 8, 4, 16, dtype=jnp.float32),
        beta=array(2, 8, 4, dtype=jnp.float32), mask=Segments(jnp.zeros(8, jnp.int32)), return_state=True,
    )  # fmt: skip
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{attnops.explain(request, 'linear_attention')}\n")
    found = run_json(*arguments)["request"]
    assert (found["key_heads"], found["value_heads"], found["decay"], found["beta"]) == (2, 4, "channel", True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--soft-cap", "30"], "--soft-cap is an option of attention, which linear_attention does not compute"),
        (["--scale", "0"], "--scale is an option of attention"),
        (["--options", "gamma=1"], "gamma is no option of linear attention; it has"),
        (["--options", "beta=1"], "beta='1' must be yes or no"),
        (["--options", "decay=row"], "decay='row' must be one of"),
        (["--options", "decay"], "--options='decay' must be name=value"),
        (["--options", "scale=x"], "scale='x' must be a number"),
        (["--mask", "causal"], "mask is Causal(), but must be made of Segments and KeyPadding"),
        (["-H", "4", "-K", "3"], "K must divide Hv"),
    ],
)
def test_what_it_has_not_is_refused(run: Any, arguments: list[str], text: str) -> None:
    result = run("explain", "linear_attention", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())
    other = run("explain", "flash", "--options", "decay=head")
    assert (other.exit_code, "is for operations that aren't attention" in other.output) == (2, True)


def test_the_table_has_a_row_for_each_feature() -> None:
    header, _, *rows = markdown_table().splitlines()
    assert header.startswith("| | `linear_attention` ")
    assert len(rows) == 16
    assert not any("–" in row for row in rows)
