"""The real compilers compile the kernels of linear attention without a GPU; XLA updates donated states in place."""

from __future__ import annotations

import re
from typing import Any

import cuda_compiler
import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata
from attnops_triton.aot import compile_for, kernels
from attnops_triton.linear.operation import TritonLinearAttention
from attnops_triton.targets import SHARED_MEMORY, target

pytestmark = pytest.mark.slow
B, H = 2, 4
CASES = {
    "a prompt": (4096, 128, "bfloat16", True, None),
    "a prompt, rounded once": (4096, 128, "bfloat16", True, "default"),
    "sums of 100 tokens": (100, 64, "bfloat16", False, None),
    "float32": (256, 64, "float32", True, None),
    "D 256": (4096, 256, "bfloat16", True, None),
    "a token": (1, 128, "bfloat16", True, None),
}
QUICKER = ("a prompt-sm_90", "a prompt-gfx942", "a token-sm_80", "sums of 100 tokens-sm_100")


def call(case: str) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """A function that updates a state, and its arguments, the state first."""
    T, D, dtype, beta, precision = CASES[case]
    metadata = OperationMetadata(platform="cuda", on_unsupported="error", precision=precision)  # type: ignore[arg-type]
    operation = TritonLinearAttention(metadata)

    def run(state: jax.Array, q: jax.Array, v: jax.Array, gate: jax.Array) -> Any:
        # A prompt without betas has no first state either.
        more = {"beta": gate, "initial_state": state} if beta else {}
        return operation(q, q, v, decay=gate, return_state=True, mode="prefill", **more)

    q, v = (jax.ShapeDtypeStruct((B, T, heads, D), jnp.dtype(dtype)) for heads in (H // 2, H))
    state, gate = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, H, D, D), (B, T, H)))
    return run, (state, q, v, gate)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.tier(quick=[], slow=QUICKER)
def test_it_compiles_within_shared_memory(case: str, arch: str) -> None:
    run, arguments = call(case)
    launched = kernels(run, arguments, arch)
    assert len(launched) == (1 if case == "a token" else 2)
    for x in launched:
        binary = compile_for(x, arch)
        name = x.recipe.kernel.name
        assert binary.shared <= SHARED_MEMORY[arch], f"{name} with {x.tiles} needs {binary.shared} bytes"
        if case.startswith("a prompt") and arch in ("sm_90", "gfx942") and name.endswith("chunks"):
            assert binary.count("LDL", "STL") == 0
            assert binary.count("HGMMA") or any("mfma" in name for name in binary.instructions)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("case", [case for case in CASES if case != "a token"])
@pytest.mark.tier(quick=[], slow=("a prompt, rounded once-sm_90", "a prompt-gfx942", "sums of 100 tokens-sm_100",
                                  "float32-sm_80"))  # fmt: skip
def test_gradients_compile_within_shared_memory(case: str, arch: str) -> None:
    run, arguments = call(case)

    def gradients(*arguments: jax.Array) -> Any:
        results, pull_back = jax.vjp(run, *arguments)
        return pull_back(results)

    launched = kernels(gradients, arguments, arch)
    names = [x.recipe.kernel.name.removeprefix("attnops_linear_") for x in launched]
    assert names == ["scores", "chunks", "scores", "chunks_backward", "gradients"]
    for name, x in list(zip(names, launched, strict=True))[1:]:
        binary = compile_for(x, arch)
        assert binary.shared <= SHARED_MEMORY[arch], f"{name} with {x.tiles} needs {binary.shared} bytes"
        # Assemblers may leave programs that need too many registers only 32.
        assert binary.registers > 64 or not binary.spilled
        if case.startswith("a prompt") and arch in ("sm_90", "gfx942"):
            spills = binary.spilled if arch == "gfx942" else binary.count("LDL", "STL")
            assert spills <= (300 if name in ("scores", "gradients") else 0), (name, spills)
        if name == "gradients" and arch == "sm_90" and "bfloat16" in CASES[case]:
            # Accumulators are in braces, and so would be a left operand in registers.
            products = re.findall(r"wgmma\.mma_async\S* (\{[^}]*\}), (\S)", binary.text)
            assert products
            assert all(left == "%" for _, left in products)


@pytest.mark.skipif(not cuda_compiler.PLUGIN.exists(), reason="`make test-all` installs XLA's compiler for CUDA")
@pytest.mark.parametrize("case", ["a token", "float32"])
def test_a_donated_state_is_updated_in_place(case: str) -> None:
    run, arguments = call(case)
    shape = ",".join(map(str, arguments[0].shape))
    for donated in ((0,), ()):
        with target("sm_90"):
            compiled = cuda_compiler.compiled(jax.jit(run, donate_argnums=donated), *arguments)
        copies = re.findall(rf"= \(?f32\[{shape}\]\S* copy(?:-start)?\(", compiled.as_text())
        assert len(copies) == (0 if donated else 1)
        size = 4 * arguments[0].size
        assert compiled.memory_analysis().alias_size_in_bytes == (size if donated else 0)
