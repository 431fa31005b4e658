"""Exponentials by polynomials, simulated: their values, and mistakes that tests notice."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from specialised_kernels import both, names_of_simulated
from triton_mistakes import mistaken, with_mistakes

from attnops.masks import Causal
from attnops_testing import attention, attention_gradients
from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, tolerance
from attnops_triton.flash.blackwell import exponentials
from attnops_triton.language import simulator
from attnops_triton.language.source import KernelFunction
from attnops_triton.targets import target

CLAMP = "x = gl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)"
MISTAKES = {
    "the first coefficient is Taylor's": ("0.99992807", "1.0"),
    "a coefficient is missing": ("0.05517167 * rest + ", ""),
    "numbers are rounded to multiples of 2": ("8388608.0", "16777216.0"),
    "the bias of an exponent is missing": ("8388608.0 + 127.0", "8388608.0"),
    "what is far below is not 0": (CLAMP, "pass"),
    "NaN becomes a number": (CLAMP, "x = gl.maximum(x, -127.0)"),
}


def is_right(*pairs: str) -> bool:
    """Whether powers of 2 have no more than the error that is documented, with parts of the text replaced."""
    names = simulator.Machine(0).language()
    text = textwrap.dedent(inspect.getsource(exponentials.polynomial.fn)).split("\n", 1)[1]
    exec(mistaken(text, *pairs), names)
    x = np.concatenate([-np.geomspace(1e-6, 126, 5000), np.arange(-126, 1), [-200, -1e30, -np.inf, np.nan]])
    with np.errstate(all="ignore"):
        found = np.asarray(names["polynomial"](simulator.tensor(x.astype(np.float32))))
    *numbers, far, farther, masked, nan = found
    error = np.abs(np.array(numbers) / 2.0 ** x[:-4].astype(np.float32).astype(np.float64) - 1).max()
    return bool(error < 7.6e-5 and far == farther == masked == 0 and np.isnan(nan))


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_mistakes_in_polynomials_are_noticed(mistake: str | None) -> None:
    assert is_right(*MISTAKES.get(mistake or "", ())) is (mistake is None)


# What is replaced in the text of all kernels for a whole call.
PLANTED = {
    None: (),
    "masked scores have weights": (CLAMP, "x = gl.maximum(x, -1.0)"),
    "all but the power is left out": ("+ 0.69326099) * rest + 0.99992807", "+ 0.69326099) * 0.0 + 0.99992807"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTED)
def test_simulated_kernels_with_polynomials_are_right(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replaced = names_of_simulated(monkeypatch), []
    real = simulator.simulate

    def changed(kernel: KernelFunction, *given: Any) -> None:
        if PLANTED[mistake] and kernel.options.by_polynomial:
            replaced.append(kernel.name)
            kernel = with_mistakes(kernel, *PLANTED[mistake])
        real(kernel, *given)

    monkeypatch.setattr(simulator, "simulate", changed)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(1, 300, 1, 64)).astype(np.float16) for _ in range(4)]
    with target("sm_100"):
        found = jax.block_until_ready(both({"mask": Causal()}, interpret=True)(*given))
    *qkv, d_out = given
    mask = np.tri(300, dtype=bool)
    exact, narrow = (attention(*qkv, mask=mask, dtype=dtype) for dtype in (np.float64, np.float16))
    wrong = []
    allowed = tolerance(exact.out, narrow.out, exact.out_magnitude, np.float16, OUTPUT_FACTOR)
    wrong.append(not np.allclose(found[0], exact.out, rtol=0, atol=allowed))
    of = [attention_gradients(*qkv, d_out=d_out, mask=mask, dtype=dtype) for dtype in (np.float64, np.float16)]
    for own, name in zip(found[1:], ("query", "key", "value"), strict=True):
        values, rounded = (x.values[name] for x in of)
        allowed = tolerance(values, rounded, of[0].magnitudes[name], np.float16, GRADIENT_FACTOR)
        wrong.append(not np.allclose(own, values, rtol=0, atol=allowed))
    assert len(run) == 3
    if mistake is None:
        assert not any(wrong)
    else:
        assert replaced == ["attnops_flash_forward", "attnops_flash_backward_query"]
        assert wrong[0]
        assert wrong[1]
