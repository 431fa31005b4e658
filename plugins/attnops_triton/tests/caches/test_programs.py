"""Calls over caches in programs for GPUs, lowered without a GPU."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops.masks import Causal, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized
from attnops_triton.aot import kernels
from attnops_triton.caches.limits import unsupported
from attnops_triton.caches.tile_sizes import splits
from attnops_triton.targets import target

UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(name)
             for name in ("triton_kernel_call", "triton_kernel_call_ffi")]  # fmt: skip
OPERATION: Any = OperationRegistry.create(
    "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error", block_k=16)
)


def paged(batch: int = 2, most: int = 4, **options: Any) -> Any:
    """The shapes of a cache of pages."""
    sizes = {"batch": batch, "pages": batch * most, "max_pages": most, "page_size": 16, "kv_heads": 1, "head_dim": 16}
    return jax.eval_shape(lambda: PagedCache.create(**sizes | options))


def arrays(batch: int = 2, T: int = 1) -> tuple[Any, Any]:
    """Query of two heads, and key or value."""
    return tuple(jax.ShapeDtypeStruct((batch, T, h, 16), jnp.bfloat16) for h in (2, 1))  # type: ignore[return-value]


def step(q: Any, k: Any, cache: Cache) -> Any:
    out, cache = OPERATION.step(q, k, k, cache, mask=Causal())
    return out.attention_outputs, cache


@pytest.mark.slow
def test_calls_and_steps_are_exported_from_a_host_without_a_gpu() -> None:
    arguments = (*arrays(), paged())

    def both(q: Any, k: Any, cache: Cache) -> Any:
        out, cache = step(q, k, cache)
        return out, OPERATION(q, cache, mask=Causal(), return_lse=True), cache

    with target("sm_90"), splits(2):
        exported = jax.export.export(jax.jit(both), platforms=["cuda"], disabled_checks=UNCHECKED)(*arguments)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert (again.in_tree, again.out_tree) == (exported.in_tree, exported.out_tree)
    # Each of them with the kernel that merges splits.
    assert again.mlir_module().count("custom_call @triton_kernel_call") == 4


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"codec": Quantized("int8")}, marks=pytest.mark.slow)], ids=["plain", "int8"]
)
def test_a_step_writes_to_the_donated_cache(options: dict[str, Any]) -> None:
    q, k = arrays()
    cache = paged(**options)
    with target("sm_90"):
        lowered = jax.jit(step, donate_argnums=2).trace(q, k, cache).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    # The arguments that are stores of tokens are donated, and are the operands that the kernel writes to.
    store = jax.tree.leaves(cache.store)
    (call,) = re.findall(r"custom_call @triton_kernel_call\w*\(([^)]*)\)(.*)", text)
    operands, attributes = [x.strip() for x in call[0].split(",")], call[1]
    aliases = [int(i) for i in re.findall(r"operand_index = (\d+)", attributes)]
    assert len(aliases) == len(store)
    head = text[text.index("@main") : text.index("\n", text.index("@main"))]
    donated = set(re.findall(r"(%arg\d+): tensor<[^>]*> {[^}]*(?:tf.aliasing_output|jax.buffer_donor)", head))
    assert {operands[i] for i in aliases} <= donated


@pytest.mark.parametrize(
    ("cache", "length", "is_read"), [("dense", 1 << 23, True), ("dense", 1 << 24, False), ("paged", 1 << 24, True)]
)
def test_offsets_in_a_block_are_of_32_bits(cache: str, length: int, is_read: bool) -> None:
    sizes: dict[str, Any] = {"batch": 2, "kv_heads": 1, "head_dim": 128}
    pages = {"pages": 8, "page_size": 128, "max_pages": length // 128}
    create = {
        "dense": lambda: DenseCache.create(length=length, **sizes),
        "paged": lambda: PagedCache.create(**pages, **sizes),
    }
    query = jax.ShapeDtypeStruct((2, 1, 4, 128), jnp.bfloat16)
    found: list[Any] = []

    def reasons(query: Any, cache: Cache) -> None:
        found.extend(unsupported(OPERATION.request(query, cache)))

    jax.eval_shape(reasons, query, jax.eval_shape(create[cache]))
    assert [x.argument for x in found] == ([] if is_read else ["cache"])


@pytest.mark.slow
def test_one_program_serves_all_lengths_fill_states_and_batches_of_more_than_one() -> None:
    found = set()
    for batch, most in ((2, 4), (3, 7), (5, 32)):
        with splits(3):
            q, _ = arrays(batch)
            call = lambda q, c: OPERATION(q, c, mask=Causal()).attention_outputs  # noqa: E731
            found |= {x.recipe for x in kernels(call, (q, paged(batch, most)), "sm_90")}
    assert sorted(x.kernel.name for x in found) == ["attnops_ragged", "attnops_ragged_merge"]


@pytest.mark.slow
def test_causal_masks_and_windows_of_any_width_have_one_program() -> None:
    found = set()
    q, _ = arrays()
    for mask in (None, Causal(), SlidingWindow(7, 0), Causal() & SlidingWindow(30, 2)):
        with splits(1):
            call = lambda q, c, mask=mask: OPERATION(q, c, mask=mask).attention_outputs  # noqa: E731
            found |= {x.recipe for x in kernels(call, (q, paged()), "sm_90")}
    assert len(found) == 1


@pytest.mark.slow
def test_one_program_merges_the_splits_of_kernels_with_other_pages_masks_and_steps() -> None:
    found = set()
    q, k = arrays()
    for cache, mask in ((paged(), Causal()), (paged(page_size=32), Causal() & SlidingWindow(7, 0))):
        with splits(3):
            call = lambda q, c, mask=mask: OPERATION(q, c, mask=mask).attention_outputs  # noqa: E731
            found |= {x.recipe for x in kernels(call, (q, cache), "sm_90")}
            found |= {x.recipe for x in kernels(step, (q, k, cache), "sm_90")}
    assert [x.kernel.name for x in found].count("attnops_ragged_merge") == 1
    assert len({x.key() for x in found}) == len(found) == 5


def test_one_program_merges_splits_of_any_storage_width_and_scores_and_of_any_precision() -> None:
    q, _ = arrays()
    sizes: dict[str, Any] = {"batch": 2, "length": 64, "kv_heads": 1, "head_dim": 16}
    found: dict[str, set[Any]] = {"attnops_ragged": set(), "attnops_ragged_merge": set()}
    for cache, precision, options in (
        (paged(), None, {"logits_soft_cap": 2.0}),
        (paged(), lax.Precision.DEFAULT, {"logits_soft_cap": 2.0}),
        (paged(width=48), None, {"logits_soft_cap": 3.0}),
        (jax.eval_shape(lambda: DenseCache.create(**sizes)), None, {"bias": ALiBi(np.ones(2, np.float32))}),
        (jax.eval_shape(lambda: DenseCache.create(codec=Quantized("int8"), **sizes)), None, {}),
    ):
        operation: Any = OperationRegistry.create(
            "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error", block_k=16,
                                                      precision=precision)
        )  # fmt: skip
        with splits(3):
            call = lambda q, c, op=operation, options=options: op(q, c, **options).attention_outputs  # noqa: E731
            for each in kernels(call, (q, cache), "sm_90"):
                found[each.recipe.kernel.name].add(each.recipe)
    assert [len(x) for x in found.values()] == [4, 1], "products are not of float32"


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["page", "tiles", "scale", "has_bias", "is_even"])
def test_options_are_part_of_a_key_and_equal_options_are_one_program(changed: str) -> None:
    q, _ = arrays()
    with splits(1):
        call = lambda q, c: OPERATION(q, c, mask=Causal()).attention_outputs  # noqa: E731
        first, second = (kernels(call, (q, paged()), "sm_90")[0].recipe for _ in range(2))
    assert (first, first.key()) == (second, second.key())
    options: Any = first.kernel.options  # type: ignore[union-attr]
    other = {"page": 32, "tiles": dataclasses.replace(options.tiles, rows=32), "scale": 0.5}.get(changed)
    given = {changed: not getattr(options, changed) if other is None else other}
    kernel: Any = dataclasses.replace(first.kernel, options=dataclasses.replace(options, **given))
    assert dataclasses.replace(first, kernel=kernel).key() != first.key()
