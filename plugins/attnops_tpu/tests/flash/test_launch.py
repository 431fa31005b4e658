"""The vector memory that a kernel asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels import Scoring
from attnops_tpu.flash.launch import compiler_params
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.generations import GENERATIONS, bounds_checks


def plan(vmem: int, dense: int = 0) -> FlashPlan:
    """A plan of which only the memory matters."""
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(FlashPlan))
    return FlashPlan(**fields | {"vmem": vmem, "bq": 1024, "bk": 512, "scoring": Scoring(dense=dense)})


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_limit_is_what_is_needed_and_a_margin_but_never_more_than_the_most(name: str) -> None:
    vmem = GENERATIONS[name].vmem
    small, large = (compiler_params(plan(vmem), 3, n).vmem_limit_bytes for n in (1 << 20, vmem))
    assert 8 << 20 < small < 10 << 20
    assert large == vmem
    assert compiler_params(plan(vmem, dense=1), 3, 1 << 20).vmem_limit_bytes == small + 4 * 1024 * 512
    few, many = (compiler_params(plan(vmem), 3, 1 << 20, spilled=n).vmem_limit_bytes for n in (1 << 20, 9 << 20))
    assert (few, many) == (small, small + (1 << 20))


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.slow
def test_the_environment_switches_bounds_checks_of_all_kernels(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of calls like one that was traced under the other value."""
    flash = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    x, bias = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float32)

    def kernels() -> str:
        def gradients(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
            out, pull_back = jax.vjp(lambda x, bias: flash(x, x, x, bias=bias).attention_outputs, x, bias)
            return (out, *pull_back(out))

        return str(jax.make_jaxpr(gradients)(x, bias))

    keys = []
    for each in ("0", "1", value):
        monkeypatch.setenv("ATTNOPS_TPU_BOUNDS_CHECKS", each)
        text = kernels()
        keys.append(flash.environment_key())
    assert len(set(keys)) == 2
    assert text.count(f"disable_bounds_checks={value == '0'}") == 3, "forward, backward, gradient of the bias"
    assert f"disable_bounds_checks={value == '1'}" not in text


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_TPU_BOUNDS_CHECKS", "yes")
    with pytest.raises(ValueError, match="ATTNOPS_TPU_BOUNDS_CHECKS='yes' must be 0 or 1"):
        bounds_checks()
