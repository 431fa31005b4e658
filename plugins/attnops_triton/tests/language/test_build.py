"""Programs are compiled once, for all processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from triton_copy import TEXT, copy_recipe

from attnops_triton import versions
from attnops_triton.language import build, store
from attnops_triton.language.build import CompiledKernel, Recipe, from_store, stripped
from attnops_triton.language.source import KernelFunction

RECIPE = copy_recipe("sm_90", stages=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of the cache, in a state in which this process has built nothing."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "counts", build.BuildCounts())
    build._build.cache_clear()
    return tmp_path / "cache"


def counted(recipe: Recipe) -> tuple[int, int]:
    """How many programs were compiled and read so far, after building this one."""
    assert build.build(recipe).threads == 32 * recipe.warps
    return build.counts.compiled, build.counts.read


def test_a_program_is_compiled_once_and_then_read(folder: Path) -> None:
    assert counted(RECIPE) == (1, 0)
    assert counted(RECIPE) == (1, 0)
    build._build.cache_clear()
    assert counted(RECIPE) == (1, 1)
    (file,) = [path for path in folder.rglob("*") if path.is_file()]
    file.write_bytes(file.read_bytes()[:-1])
    build._build.cache_clear()
    assert counted(RECIPE) == (2, 1), "a damaged file is replaced"
    build._build.cache_clear()
    assert counted(RECIPE) == (2, 2)


def test_the_target_the_specialisation_and_the_versions_are_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [
        {}, {"arch": "sm_80"}, {"divisible": frozenset("n")}, {"warps": 8}, {"stages": 3},
        {"dtypes": ("int32", "uint32")},
        {"kernel": copy_recipe("sm_90", TEXT.replace("+", "-")).kernel},
    ]  # fmt: skip
    keys = [dataclasses.replace(RECIPE, **fields).key() for fields in changed]
    for name in ("triton", "attnops-triton"):
        monkeypatch.setattr(versions, "version_of", {name: "9"}.get)
        keys.append(RECIPE.key())
    assert len(set(keys)) == len(keys)


def test_the_functions_and_the_options_of_a_kernel_are_part_of_a_key() -> None:
    from attnops_triton.language.compat import jitted

    @dataclasses.dataclass(frozen=True)
    class Options:
        change: Any
        scale: float = 1.0

    def kernel(text: str, change: str, scale: float = 1.0) -> KernelFunction:
        options = Options(jitted("change", f"def change(x):\n    return x {change}\n"), scale)
        return KernelFunction(jitted("copy", text), (("x",), "y"), ("n",), options)

    text = "def copy(x, n, options: tl.constexpr):\n    tl.store(x[1], options.change(tl.load(x[0][0])))\n"
    given = [
        kernel(text, "+ 1"),
        kernel(text, "+ 2"),
        kernel(text, "+ 1", 2.0),
        kernel(f"{text}    tl.debug_barrier()\n", "+ 1"),
    ]
    assert given[0] == kernel(text, "+ 1"), "one function per text"
    assert len({dataclasses.replace(RECIPE, kernel=x).key() for x in given}) == len(given)
    assert given[0].pointers == ("x", "y")
    assert "def change" in given[0].text


def test_two_functions_of_one_name_are_refused() -> None:
    from attnops_triton.language.compat import jitted

    @dataclasses.dataclass(frozen=True)
    class Options:
        one: Any
        other: Any

    one, other = (jitted("change", f"def change(x):\n    return x + {i}\n") for i in range(2))
    function = jitted("copy", "def copy(x, n, options: tl.constexpr):\n    pass\n")
    assert list(KernelFunction(function, (), (), Options(one, one)).reachable) == ["change", "copy"]
    with pytest.raises(ValueError, match="have one name"):
        _ = KernelFunction(function, (), (), Options(one, other)).reachable


@pytest.mark.parametrize("value", ["", "/proc/none"])
def test_without_a_folder_nothing_is_stored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, value)
    store.write("key", b"code", {})
    assert store.read("key") is None


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.folder() == Path("/somewhere/attnops-triton")


def test_what_is_stored_is_what_is_read(folder: Path) -> None:
    program = CompiledKernel("copy", 128, 0, ((3, (1, 64, 64)),), b"code\nof several\nlines")
    fields = dataclasses.asdict(program)
    store.write("key", fields.pop("code"), fields)
    stored = store.read("key")
    assert stored is not None
    assert from_store(*stored) == program


@pytest.mark.parametrize("damage", ["code", "fields", "digest", "nothing but a line", "empty"])
def test_what_was_changed_on_disk_is_not_read(damage: str, folder: Path) -> None:
    store.write("key", b"code", {"name": "copy"})
    (file,) = [path for path in folder.rglob("*") if path.is_file()]
    stored = file.read_bytes()
    changed = {
        "code": stored[:-1] + b"X", "fields": stored.replace(b"copy", b"cope"), "digest": b"0" + stored[1:],
        "nothing but a line": b"[]\n", "empty": b"",
    }[damage]  # fmt: skip
    assert changed != stored
    file.write_bytes(changed)
    assert store.read("key") is None
    store.write("key", b"code", {"name": "copy"})
    assert store.read("key") == (b"code", {"name": "copy"})


def test_what_could_not_be_written_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.write("key", b"code", {})
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_writers_of_one_program_leave_it_whole(folder: Path) -> None:
    def write(name: str) -> None:
        for _ in range(50):
            store.write("key", name.encode() * 5000, {"name": name})
            found = store.read("key")
            assert found is not None
            assert found[0] == found[1]["name"].encode() * 5000

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, "abcd"))
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
@pytest.mark.slow
def test_a_process_forked_while_a_thread_compiles_can_compile(folder: Path) -> None:
    with build._LOCK:
        child = os.fork()
        if child == 0:
            os._exit(0 if build._LOCK.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROCESS = """
import jax, jax.numpy as jnp
from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_triton.language.build import counts
from attnops_triton.targets import target

operation = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform="cuda"))
unchecked = [jax.export.DisabledSafetyCheck.custom_call(name)
             for name in ("triton_kernel_call", "triton_kernel_call_ffi")]
with target("sm_80"):
    for n in (64, 1024, 100, 1500):
        x = jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float16)
        program = jax.jit(lambda x: operation(x, x, x, mask=Causal()).attention_outputs)
        jax.export.export(program, platforms=["cuda"], disabled_checks=unchecked)(x)
print(counts.compiled, counts.read)
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(folder: Path) -> None:
    printed = [
        subprocess.run([sys.executable, "-c", PROCESS], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    ]
    assert printed == [["2", "0"], ["0", "2"]]


def test_stripped_ptx_has_the_instructions_alone() -> None:
    text = """
    //
    // Generated by LLVM
    .version 8.0
    .visible .entry f(  // the kernel
    )
    {
        .loc 1 20 8  // f.py:20:8
        // begin inline asm
        @%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
        // end inline asm
        ret;
    }
        .file 1 "/tmp/f.py"
        .section .debug_abbrev
        {
    .b8 1  // Abbreviation Code
        }
        .section .debug_macinfo { }
    """
    wanted = [".version 8.0", ".visible .entry f(", ")", "{",
              "@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", "ret;", "}"]  # fmt: skip
    assert stripped(text).splitlines() == wanted


def test_equal_recipes_have_one_hash_that_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = copy_recipe("sm_90"), copy_recipe("sm_90")
    assert (first, hash(first)) == (second, hash(second))
    monkeypatch.setattr(KernelFunction, "__hash__", None)
    assert hash(first) == hash(second)
