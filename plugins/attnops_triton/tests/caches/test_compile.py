"""The real compilers compile kernels over caches for every architecture, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache
from attnops_triton.aot import Binary, compile_for, innermost_loops, kernels
from attnops_triton.caches.plan import CacheTileSizes
from attnops_triton.language.launch import Launched
from attnops_triton.targets import SHARED_MEMORY

B, LENGTH = 8, 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """A call over a cache of 8 rows; the defaults are a step of decoding."""

    D: int = 128
    Dv: int = 0
    G: int = 8
    page: int = 16
    codec: str = ""
    scales: str = "token_head"
    T: int = 1
    dtype: str = "bfloat16"
    storage: str = "paged"
    step: bool = False
    packed: bool = False

    @property
    def K(self) -> int:
        return 1 if self.Dv else 4

    def __str__(self) -> str:
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        changed = [f"{name} {value}" for name, value in fields.items() if value != getattr(Case(), name)]
        return ", ".join(changed) or "plain"

    def cache(self) -> Cache:
        options: dict[str, Any] = {"kv_heads": self.K, "head_dim": self.D, "latent": self.Dv or None, "batch": B}
        options["dtype"] = jnp.dtype(self.dtype)
        if self.codec:
            options["codec"] = Quantized(self.codec, self.scales)
            if self.scales != "token_head":
                scale = jnp.ones((self.K,) if self.scales == "head" else ())
                options |= {"key_scale": scale} | ({} if self.Dv else {"value_scale": scale})
        if self.storage == "dense":
            return DenseCache.create(length=LENGTH, **options)
        if self.storage == "ring":
            return WindowCache.create(window=1024, max_append=16, **options)
        most = LENGTH // self.page
        return PagedCache.create(pages=B * most, page_size=self.page, max_pages=most, **options)

    def kernels(self, arch: str) -> list[Launched]:
        operation: Any = OperationRegistry.create(
            "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
        )
        cache = jax.eval_shape(self.cache)
        dtype = jnp.dtype(self.dtype)
        query, key = (
            jax.ShapeDtypeStruct((1 if self.packed else B, self.T, h, self.D), dtype) for h in (self.K * self.G, self.K)
        )
        if self.packed:
            rows = jax.eval_shape(lambda: Rows(jnp.asarray([0, self.T - 1, self.T]), jnp.arange(2)))
            attend = lambda q, c, r: operation(q, c, mask=Causal(), rows=r).attention_outputs  # noqa: E731
            return kernels(attend, (query, cache, rows), arch)
        if not self.step:
            return kernels(lambda q, c: operation(q, c, mask=Causal()).attention_outputs, (query, cache), arch)
        return kernels(lambda q, k, c: operation.step(q, k, k, c, mask=Causal())[0], (query, key, cache), arch)


DIMS = ((64, 0), (80, 0), (128, 0), (256, 0), (576, 512))
CODECS = ("", "int8", "float8_e4m3fn", "float8_e5m2")
# In turns, so that each codec, page and number of heads occurs with each other, each head dim and each architecture.
TURNS = list(itertools.product((16, 64, 256), (1, 4, 8, 16)))
TABLE = []
for (d, (D, Dv)), (a, arch) in itertools.product(enumerate(DIMS), enumerate(SHARED_MEMORY)):
    turn = 3 * d + a + a // 4
    page, G = TURNS[turn % len(TURNS)]
    TABLE.append((Case(D, Dv, G, page, CODECS[(d + a) % 4], ("token_head", "head", "tensor")[turn % 3]), arch))
OTHERS = (
    Case(T=512), Case(T=5, page=64), Case(step=True), Case(step=True, T=4, codec="int8"), Case(storage="dense"),
    Case(storage="ring"), Case(page=48), Case(dtype="float32"), Case(dtype="float16"), Case(576, 512, 128, 64),
    Case(576, 512, 16, 64, dtype="float32"), Case(256, dtype="float32"), Case(64, T=64, codec="float8_e4m3fn"),
    Case(576, 512, 128, 64, "int8"), Case(T=64, packed=True),
)  # fmt: skip
TABLE += [(case, arch) for i, case in enumerate(OTHERS) for j, arch in enumerate(SHARED_MEMORY) if (i + j) % 4 == 0]
QUICK = ((Case(), "sm_90"),)
SLOW = (
    (Case(576, 512, 16, 64), "sm_80"), (Case(codec="int8"), "sm_80"), (Case(codec="float8_e4m3fn", page=64), "gfx942"),
    (Case(T=512), "sm_100"), (Case(step=True), "sm_120"), (Case(codec="int4"), "sm_80"),
    (Case(codec="int4", page=64, step=True), "gfx942"),
)  # fmt: skip


def test_every_pair_of_sizes_codecs_and_architectures_is_in_the_table() -> None:
    fields = {
        "head dim": DIMS, "codec": CODECS, "architecture": SHARED_MEMORY, "heads": (1, 4, 8, 16), "page": (16, 64, 256)
    }  # fmt: skip
    found = [((case.D, case.Dv), case.codec, arch, case.G, case.page) for case, arch in TABLE]
    for (i, first), (j, second) in itertools.combinations(enumerate(fields), 2):
        wanted = set(itertools.product(fields[first], fields[second]))  # type: ignore[arg-type]
        assert wanted <= {(row[i], row[j]) for row in found}, f"{first} and {second}"


def marks(case: Case, arch: str) -> list[pytest.MarkDecorator]:
    if (case, arch) in QUICK:
        return []
    return [pytest.mark.slow] if (case, arch) in SLOW else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("case", "arch"),
    [pytest.param(*x, marks=marks(*x), id=f"{x[0]}-{x[1]}") for x in dict.fromkeys([*QUICK, *SLOW, *TABLE])],
)
@pytest.mark.slow
@pytest.mark.tier(every=6)
def test_a_case_compiles_without_spills_within_shared_memory(case: Case, arch: str) -> None:
    launched = case.kernels(arch)
    assert launched[0].recipe.kernel.name == "attnops_ragged"
    for x in launched:
        binary = compile_for(x, arch)
        what = f"{x.recipe.kernel.name} with {x.tiles}"
        assert binary.shared <= SHARED_MEMORY[arch], f"{what} needs {binary.shared} bytes of shared memory"
        if case.D in (64, 128) and case.dtype != "float32":
            # A few bytes of stack may be reserved that nothing uses.
            spills = binary.count("LDL", "STL") if arch.startswith("sm_") else binary.spilled
            assert spills == 0, f"{what} spills {binary.spilled} bytes"
            assert not binary.loop["LDL"] + binary.loop["STL"]
        elif case.Dv and case.dtype != "float32":
            # Larger tiles spill a little, but need fewer instructions than tiles that spill nothing.
            spills, most = (binary.loop["LDL"] + binary.loop["STL"], 8) if arch[0] == "s" else (binary.spilled, 32)
            assert spills <= most, f"{what} spills {binary.spilled} bytes, {spills} times in the loop"
        if case.dtype != "float32" and x is launched[0]:
            products = ("HMMA", "HGMMA", "UTCHMMA")
            assert binary.count(*products) or any("mfma" in name for name in binary.instructions)


def per_byte(launched: Launched, case: Case) -> tuple[float, Binary]:
    """Warp instructions per byte of keys and values, in the loop over tiles without a mask."""
    binary, tiles = compile_for(launched, "sm_90"), launched.tiles
    itemsize = 0.5 if case.codec == "int4" else jnp.dtype(case.codec or case.dtype).itemsize
    assert isinstance(tiles, CacheTileSizes)
    return sum(binary.loop.values()) * tiles.warps / (tiles.bk * 2 * case.D * itemsize), binary


MOST = (("int8", 0.12), ("int4", 0.24))


# vLLM 0.33.0's kernel for a step of decoding, compiled in the same way, needs 0.122 and 0.473
# (`benchmarks/triton_decode.py`).
@pytest.mark.parametrize(
    ("case", "most"),
    [(Case(), 0.045), *(pytest.param(Case(codec=x), most, marks=pytest.mark.slow) for x, most in MOST)],
    ids=str,
)
def test_the_loop_of_a_step_loads_16_bytes_at_a_time_without_waiting(case: Case, most: float) -> None:
    (launched, *_) = case.kernels("sm_90")
    instructions, binary = per_byte(launched, case)
    assert instructions <= most
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", binary.text)
    large = sum(int(size, 0) == 16 for size in copies)
    # Scales of 4 bytes and entries of the table are the others.
    assert large >= 0.8 * len(copies) > 0
    assert not binary.loop["LDL"] + binary.loop["STL"]
    loads = binary.loop["LDG"]
    assert loads <= 8, "keys or values are loaded to registers"


def waits(launched: Launched, arch: str) -> list[tuple[int, list[int]]]:
    """Of each loop over tiles, the one without a mask first: the groups of copies that a turn issues, and how many of
    the latest may be incomplete at each wait.
    """
    loops = ("\n".join(loop) for loop in innermost_loops(compile_for(launched, arch).code))
    found = [loop for loop in loops if "HMMA" in loop]
    return [
        (loop.count("LDGDEPBAR"), [int(x, 0) for x in re.findall(r" DEPBAR\.LE SB0, (0x\w+)", loop)]) for loop in found
    ]


RARE = [pytest.param(x, marks=pytest.mark.exhaustive) for x in (Case(page=64), Case(storage="dense"), Case(64))]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("case", [Case(), Case(step=True), Case(codec="int8"), *RARE], ids=str)
def test_a_tile_is_computed_while_the_next_one_is_copied(case: Case, arch: str) -> None:
    (launched, *_) = case.kernels(arch)
    if case.codec and arch == "sm_80":
        assert launched.tiles.stages == 2  # its shared memory would hold one program only
        return
    found = waits(launched, arch)
    assert len(found) == 2
    for groups, incomplete in found:
        assert groups >= 2, "keys and values are copied in a group each"
        assert incomplete, "nothing waits for the copies"
        assert min(incomplete) >= groups, (
            f"a wait lets {min(incomplete)} of the next tile's {groups} groups be incomplete"
        )


@pytest.mark.slow
def test_with_two_stages_there_is_one_buffer() -> None:
    (launched, *_) = Case().kernels("sm_90")
    launched = dataclasses.replace(launched, recipe=dataclasses.replace(launched.recipe, stages=2))
    assert [min(incomplete) for _, incomplete in waits(launched, "sm_90")] == [0, 0]


@pytest.mark.slow
def test_on_amd_the_next_tile_is_loaded_before_the_products_of_a_tile_and_stored_after_them() -> None:
    text = compile_for(Case().kernels("gfx942")[0], "gfx942").code
    blocks = re.split(r"^(\.LBB\w+):", text, flags=re.MULTILINE)
    labelled = zip(blocks[1::2], blocks[2::2], strict=True)
    loop = next(x for label, x in labelled if "mfma" in x and re.search(rf"s_c?branch\w* {label}\b", x))
    load, product, wait, store = (loop.index(x) for x in ("global_load_dwordx4", "v_mfma", "vmcnt", "ds_write"))
    assert load < product < wait < store
    assert loop[:store].count("v_mfma") >= 0.7 * loop.count("v_mfma")
