"""The vector memory that a kernel asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from attnops_tpu.flash.launch import Scratch, compiler_params, needed
from attnops_tpu.flash.plan import Plan
from attnops_tpu.generations import GENERATIONS
from jax.experimental import pallas as pl

from attnops.kernels import Scoring


def plan(vmem: int, dense: int = 0) -> Plan:
    """A plan of which only the memory matters."""
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Plan))
    return Plan(**fields | {"vmem": vmem, "bq": 1024, "bk": 512, "scoring": Scoring(dense=dense)})


def test_blocks_have_two_buffers_of_complete_registers() -> None:
    rows = [(pl.BlockSpec((None, None, 1024, 80), lambda: (0,)), jnp.bfloat16)]
    assert needed(rows, []) == 2 * 1024 * 128 * 2
    columns = [(pl.BlockSpec((None, 2, 5, 256), lambda: (0,)), jnp.bfloat16)]
    assert needed(columns, []) == 2 * 2 * 16 * 256 * 2
    assert needed([(pl.BlockSpec((None, None, 1, 256), lambda: (0,)), jnp.float32)], []) == 2 * 256 * 4
    assert needed([(pl.BlockSpec(memory_space=pl.ANY), jnp.float32)], [Scratch((8, 128), jnp.float32)]) == 4096


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_limit_is_what_is_needed_and_a_margin_but_never_more_than_the_most(name: str) -> None:
    vmem = GENERATIONS[name].vmem
    small, large = (compiler_params(plan(vmem), 3, n).vmem_limit_bytes for n in (1 << 20, vmem))
    assert 8 << 20 < small < 10 << 20
    assert large == vmem
    assert compiler_params(plan(vmem, dense=1), 3, 1 << 20).vmem_limit_bytes == small + 4 * 1024 * 512
