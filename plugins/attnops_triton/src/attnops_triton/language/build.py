"""Kernels compiled to programs: PTX for NVIDIA GPUs, code objects for AMD's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import threading
import time
from typing import Any, Final

import jax

from attnops_triton import versions
from attnops_triton.language import store
from attnops_triton.language.source import KernelFunction
from attnops_triton.targets import capability, is_amd, ptx_version, shared_memory, wave_size

_POINTERS: Final = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "int32": "*i32", "uint32": "*u32",
    "uint8": "*u8",
}  # fmt: skip
_LOCK = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock after a fork: if another thread held it then, the child would wait for ever."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that a program's code depends on, except the versions of the compilers."""

    kernel: KernelFunction
    dtypes: tuple[str, ...]  # names of the dtypes of its arrays
    divisible: frozenset[str]  # names of its integer arguments that are multiples of 16
    warps: int  # per program
    stages: int  # stages of the software pipeline
    arch: str  # such as ``"sm_90"``
    registers: int = 0  # the most registers per thread; 0 leaves the number to the assembler. Only for NVIDIA GPUs

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Calls outside of `jax.jit` look a recipe up, whose options have hundreds of fields."""
        return hash(tuple(getattr(self, x.name) for x in dataclasses.fields(self)))

    def key(self) -> str:
        """A unique name of the program: a hash of this recipe and of the versions of the compilers."""
        parts = (
            self.kernel.key, self.dtypes, sorted(self.divisible), self.warps, self.stages, self.arch,
            self.registers, ptx_version(self.arch, self.kernel.gluon), wave_size(self.arch), store.FORMAT,
            *(versions.version_of(name) for name in ("triton", "attnops-triton")),
        )  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel."""

    name: str  # the name of the function in the code
    threads: int  # threads per program
    shared: int  # bytes of shared memory per program
    # Of each array with a tensor map, in the order of pointers: the map's swizzle, and the block that one copy has.
    maps: tuple[tuple[int, tuple[int, ...]], ...]
    code: bytes = dataclasses.field(repr=False)  # PTX, or a code object


@dataclasses.dataclass
class BuildCounts:
    """What `build` did in this process."""

    compiled: int = 0  # programs that Triton compiled
    read: int = 0  # programs read from the cache on disk
    seconds: float = 0.0  # the time spent on both


counts: Final = BuildCounts()


def build(recipe: Recipe) -> CompiledKernel:
    """The program of a recipe: from this process's memory, from the cache on disk, or newly compiled."""
    with _LOCK:
        return _build(recipe)


@functools.lru_cache(maxsize=4096)
def _build(recipe: Recipe) -> CompiledKernel:
    start = time.perf_counter()
    key = recipe.key()
    stored = store.read(key)
    if stored is None:
        program = compiled(recipe)
        fields = dataclasses.asdict(program)
        store.write(key, fields.pop("code"), fields)
        counts.compiled += 1
    else:
        program = from_store(*stored)
        counts.read += 1
    counts.seconds += time.perf_counter() - start
    return program


def from_store(code: bytes, fields: dict[str, Any]) -> CompiledKernel:
    """A program from its code and its other fields as JSON, which has lists in place of tuples."""
    maps = tuple((swizzle, tuple(block)) for swizzle, block in fields["maps"])
    return CompiledKernel(**{**fields, "maps": maps}, code=code)


def compiled(recipe: Recipe) -> CompiledKernel:
    """The program of a recipe, by Triton's compiler, without its assembler.

    If tiles that a call states need more shared memory than there is, the pipeline has fewer stages.

    Raises:
        ValueError: the program needs more shared memory than there is with one stage too.
        NotImplementedError: the program needs memory that launching does not allocate.
    """
    name, arch = recipe.kernel.name, recipe.arch
    modules, metadata = lowered(recipe)
    room = shared_memory(arch)
    if metadata["shared"] > room:
        if recipe.stages > 1 and not recipe.kernel.gluon:
            return compiled(dataclasses.replace(recipe, stages=recipe.stages - 1))
        raise ValueError(
            f"{name} for {arch} needs {metadata['shared']:,} bytes of shared memory, of which a program has {room:,}: "
            "state smaller block_q and block_k in OperationMetadata, or neither"
        )
    if needed := metadata.get("global_scratch_size") or 0:
        raise NotImplementedError(f"{name} for {arch} needs {needed} bytes of scratch memory a program")
    if is_amd(arch):
        threads, code = recipe.warps * wave_size(arch), modules["hsaco"]
        return CompiledKernel(metadata["name"], threads, metadata["shared"], (), code)
    # Specialised kernels have more threads than ``warps`` says.
    threads = int(re.findall(r"\.reqntid (\d+)", modules["ptx"])[0])
    maps = tuple((x["swizzle"], tuple(x["block_size"])) for x in metadata.get("tensordesc_meta") or ())
    return CompiledKernel(metadata["name"], threads, metadata["shared"], maps, stripped(modules["ptx"]).encode())


def stripped(ptx: str) -> str:
    """PTX without comments, indentation, line numbers and debugging sections: jaxlib hashes it at each launch."""
    ptx = re.sub(r"\.section\s+\.debug\w*\s*\{[^{}]*\}", "", ptx)
    lines = (re.sub(r"//.*|^\s*\.(?:loc|file)\s.*", "", line).strip() for line in ptx.splitlines())
    return "\n".join(filter(None, lines)) + "\n"


def _map_type(block: tuple[int, ...], dtype: str) -> str:
    """Gluon's type of a tensor map; ``dtype`` is Triton's name."""
    from triton.experimental.gluon import language as gl

    bits = int(dtype[-2:])
    # A block of statistics is read by rows, other blocks by the tensor cores.
    layout = (
        gl.NVMMASharedLayout(0, bits, 2)
        if len(block) == 2
        else gl.NVMMASharedLayout.get_default_for(
            list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}.get(dtype, gl.float32)
        )
    )
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"


def _signature(recipe: Recipe) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], list[tuple[int, ...]]]:
    """Triton's types by parameter, compile-time values, and which arguments are multiples of 16, both by path."""
    kernel = recipe.kernel
    types = dict(zip(kernel.pointers, (_POINTERS[name] for name in recipe.dtypes), strict=True))
    for name, block in kernel.blocks:
        types[name] = _map_type(block, types[name].removeprefix("*"))
    types |= dict.fromkeys(kernel.integers, "i32")
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []

    def type_of(x: Any, path: tuple[int, ...]) -> Any:
        if isinstance(x, tuple):
            inner = [type_of(y, (*path, i)) for i, y in enumerate(x)]
            return type(x)(*inner) if hasattr(x, "_fields") else tuple(inner)
        if not isinstance(x, str):
            constants[path] = x
            return "constexpr"
        if types[x].startswith("*") or x in recipe.divisible:
            aligned.append(path)
        return types[x]

    named = kernel.arguments({name: name for name in types})
    given = zip(kernel.parameters, named, strict=True)
    return {name: type_of(x, (i,)) for i, (name, x) in enumerate(given)}, constants, aligned


def lowered(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of Triton's stages by name (modules, texts or binaries), and Triton's metadata."""
    from triton import knobs

    jax.monitoring.record_event("/attnops/kernel/compiled")
    with knobs.compilation.scope():
        # Each inlined function has labels for debuggers. To the assembler they end basic blocks, which costs registers
        # and instructions: 12 of 186, and 57 of 1,099, in the forward kernel with an array bias on sm_80.
        knobs.compilation.disable_line_info = True
        return _lowered(recipe)


def _lowered(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    kernel, arch = recipe.kernel, recipe.arch
    if kernel.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource
    amd = is_amd(arch)
    signature, constants, aligned = _signature(recipe)
    source = (GluonASTSource if kernel.gluon else ASTSource)(
        kernel.function, signature=signature, constexprs=constants,
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )  # fmt: skip
    target = GPUTarget("hip" if amd else "cuda", arch if amd else capability(arch), wave_size(arch))
    backend = make_backend(target)
    # Fusion is off by default from Triton 3.10 on; without it every multiply-add is two instructions.
    given: dict[str, Any] = {"num_warps": recipe.warps, "num_stages": recipe.stages, "enable_fp_fusion": True}
    if not amd:
        given |= {"ptx_version": ptx_version(arch, kernel.gluon), "maxnreg": recipe.registers or None}
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module: Any = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    modules: dict[str, Any] = {}
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    for stage, lower in stages.items():
        if stage != "cubin":
            module = modules[stage] = lower(module, metadata)
    return modules, metadata
