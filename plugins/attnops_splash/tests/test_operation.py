"""What `splash` refuses, and that `attnops check` holds it to the contract."""

import ast
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import attnops_cli
from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal, KeyPadding, Segments, SlidingWindow
from attnops_splash import SplashAttention, operation

Q = jax.ShapeDtypeStruct((2, 40, 4, 64), jnp.bfloat16)
TPU = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")


@pytest.fixture
def check():
    """A function that runs `attnops check splash` for a feature, and returns its status and what it prints."""
    before = OperationRegistry._registered[:]
    OperationRegistry.register(SplashAttention)

    def check(feature):
        options = ("--platform", "tpu", "--interpret", "--mode", "prefill", "--shrink", "0", "--feature", feature)
        result = CliRunner(env={"COLUMNS": "200"}).invoke(
            attnops_cli.make_app(), ["check", "attnops-splash:splash", *options]
        )
        return result.exit_code, result.stdout

    yield check
    OperationRegistry._registered[:] = before
    OperationRegistry.refresh()


@pytest.mark.parametrize(
    ("mask", "options", "rule"),
    [
        (KeyPadding(np.ones((2, 40), bool)), {}, "must be a band (causal, a window)"),
        (Causal() | SlidingWindow(0, 3) & KeyPadding(np.ones((2, 40), bool)), {}, "must be a band (causal, a window)"),
        (None, {"return_lse": True}, "forward_tpu has no such option"),
    ],
)
def test_refusals_have_reasons(mask, options, rule):
    op = SplashAttention(TPU)
    (reason,) = op.reasons(op.request(Q, Q, Q, mask=mask, **options))
    assert rule in str(reason)


def test_other_dtypes_are_refused():
    op = SplashAttention(TPU)
    x = jax.ShapeDtypeStruct(Q.shape, jnp.float32)
    with pytest.raises(UnsupportedError, match="must be one of \\['bfloat16'\\]"):
        jax.eval_shape(op, x, x, x)


def test_bands_and_segments_are_served():
    op = SplashAttention(TPU)
    ids = np.arange(80).reshape(2, 40) // 9
    for mask in (None, Causal(), SlidingWindow(5, 2), Causal() & Segments(ids)):
        assert op.reasons(op.request(Q, Q, Q, mask=mask, logits_soft_cap=5.0)) == []


def test_it_imports_what_plugins_may():
    text = Path(operation.__file__).read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    public = {"attnops", "attnops.kernels", "attnops.masks", "attnops.operations.flash"}
    assert {name for name in imported if name.startswith("attnops")} == public


def test_auto_does_not_pick_it():
    assert SplashAttention.rank(SplashAttention(TPU).request(Q, Q, Q)) is None


@pytest.mark.slow
def test_check_finds_it_right(check):
    status, text = check("GQA + SlidingWindow")
    assert text.startswith("attnops-splash:splash: attnops_splash.operation.SplashAttention.forward_tpu on tpu, interp")
    assert (status, "\nGQA + SlidingWindow  right" in text) == (0, True), text


@pytest.mark.slow
def test_check_finds_a_window_that_is_wrong(check, monkeypatch):
    attend = operation.attend

    @functools.wraps(attend)
    def wider(query, key, value, ids, band, *others):
        return attend(query, key, value, ids, (band[0], band[1] + 1), *others)

    monkeypatch.setattr(operation, "attend", wider)
    status, text = check("GQA + SlidingWindow")
    assert status == 1, text
    assert re.search(r"^GQA \+ SlidingWindow +wrong +attention_outputs\[", text, re.MULTILINE), text
