"""The Triton kernels of flash-linear-attention's gated delta rule, compiled without a GPU and without PyTorch.

Their source is read from an installed flash-linear-attention (``pip install --no-deps fla-core``); what it imports
besides Triton is replaced by stand-ins, which no kernel calls.
"""

from __future__ import annotations

import collections
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnops_triton import aot
from attnops_triton.targets import capability, is_amd, ptx_version, wave_size

# Modules that are read; all others of ``fla`` are stand-ins.
_READ: Final = {
    "fla.ops.utils.op", "fla.ops.utils.softplus", "fla.ops.utils.cumsum", "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o", "fla.ops.gated_delta_rule.wy_fast", "fla.ops.gated_delta_rule.chunk_fwd",
    "fla.ops.gated_delta_rule.fused_recurrent",
}  # fmt: skip
C: Final = 64


class Peer(NamedTuple):
    """A kernel of flash-linear-attention.

    Attributes:
        module: where it is, in ``fla.ops``.
        name: of the function.
        options: its compile-time arguments, without heads and head dims.
        warps: one of the choices that its authors' tuning has, as are ``stages`` and the tile sizes in ``options``.
        stages: of the software pipeline.
        absent: arguments that are None.
    """

    module: str
    name: str
    options: dict[str, Any]
    warps: int
    stages: int
    absent: tuple[str, ...]


_VARLEN: Final = ("cu_seqlens", "chunk_indices", "chunk_offsets")
# In the order in which a prompt calls them.
PROMPT: Final = (
    Peer("utils.cumsum", "chunk_local_cumsum_scalar_kernel",
         {"B": 1, "REVERSE": False, "HAS_SCALE": True}, 1, 3, _VARLEN),
    Peer("gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
         {"BC": 16, "BK": 64, "USE_G": True}, 1, 3, _VARLEN),
    Peer("gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel", {"BK": 64, "BV": 64, "USE_G": True}, 4, 3, _VARLEN),
    Peer("common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
         {"BV": 32, "USE_G": True, "USE_GK": False, "USE_INITIAL_STATE": True, "STORE_FINAL_STATE": True,
          "SAVE_NEW_VALUE": True, "STATE_V_FIRST": False}, 4, 2, ("gk", *_VARLEN)),
    Peer("common.chunk_o", "chunk_fwd_kernel_o",
         {"BK": 64, "BV": 64, "USE_G": True, "USE_G_GAMMA": False, "STATE_V_FIRST": False}, 4, 3,
         ("g_gamma", *_VARLEN)),
)  # fmt: skip
# In the order in which gradients call them; the first two compute states and changed values anew.
BACKWARD: Final = (
    PROMPT[2],
    PROMPT[3]._replace(options=PROMPT[3].options | {"STORE_FINAL_STATE": False}, absent=("gk", "ht", *_VARLEN)),
    Peer("common.chunk_o", "chunk_bwd_kernel_dv_local",
         {"BV": 128, "USE_G": True, "USE_G_GAMMA": False, "USE_A": False}, 4, 3, ("g_gamma", "A", *_VARLEN)),
    Peer("common.chunk_delta_h", "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
         {"BV": 32, "USE_G": True, "USE_GK": False, "USE_INITIAL_STATE": True, "USE_FINAL_STATE_GRADIENT": True,
          "STATE_V_FIRST": False}, 4, 2, ("gk", *_VARLEN)),
    Peer("common.chunk_o", "chunk_bwd_kernel_dqkwg",
         {"B": 1, "BV": 128, "USE_G": True, "USE_G_GAMMA": False, "USE_DW": True, "STATE_V_FIRST": False}, 4, 2,
         ("g_gamma", *_VARLEN)),
    Peer("gated_delta_rule.wy_fast", "prepare_wy_repr_bwd_kernel", {"BK": 64, "BV": 64, "USE_G": True}, 4, 2, _VARLEN),
    Peer("utils.cumsum", "chunk_local_cumsum_scalar_kernel",
         {"B": 1, "REVERSE": True, "HAS_SCALE": False}, 1, 3, ("scale", *_VARLEN)),
)  # fmt: skip
DECODE: Final = Peer(
    "gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd_kernel",
    {"BV": 8, "USE_G": True, "USE_GK": False, "USE_GV": False, "USE_QK_L2NORM_IN_KERNEL": False,
     "IS_BETA_HEADWISE": True, "USE_INITIAL_STATE": True, "STORE_FINAL_STATE": True, "STATE_V_FIRST": False,
     "USE_GATE_IN_KERNEL": False, "HAS_DT_BIAS": False, "APPLY_BETA_SIGMOID": False, "ALLOW_NEG_EIGVAL": False},
    1, 3, ("gk", "gv", "A_log", "dt_bias", *_VARLEN),
)  # fmt: skip
# Arrays of float32; the others are bfloat16.
_FLOAT32: Final = ("g", "s", "o_", "h0", "ht", "beta", "dht", "dh0", "dg", "db")


class _Anything:
    """A value of a stand-in: it can be called, and then decorates."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorated = len(arguments) == 1 and not options and inspect.isfunction(getattr(arguments[0], "fn", None))
        return arguments[0] if is_decorated or inspect.isfunction(arguments[0] if arguments else None) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False

    def keys(self) -> tuple[str, ...]:
        """No keyword arguments."""
        return ()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class _StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in _READ:
            return importlib.util.spec_from_file_location(name, self._folder / f"{name.replace('.', '/')}.py")
        if name.split(".")[0] in ("fla", "torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing but what kernels depend on: a stand-in has no code."""
        if module.__name__ == "fla.utils":
            module.__dict__["IS_TF32_SUPPORTED"] = True


def compiled(peer: Peer, folder: Path, arch: str, H: int, K: int, D: int) -> aot.Binary:
    """A kernel as machine code.

    Args:
        peer: the kernel.
        folder: that has the package ``fla``.
        arch: the architecture.
        H: value heads.
        K: key heads.
        D: the head dim of keys and of values.
    """
    if not any(isinstance(x, _Finder) for x in sys.meta_path):
        sys.meta_path.insert(0, _Finder(folder))
    function: Any = getattr(importlib.import_module(f"fla.ops.{peer.module}"), peer.name)
    while not hasattr(function, "arg_names") or hasattr(function, "values"):  # heuristics
        function = function.fn
    constants = {"H": H if peer.name.startswith("chunk_local") else K, "HV": H, "K": D, "V": D, "BT": C}
    constants |= {"BK": D, "IS_VARLEN": False, "USE_GRAPH": False, **peer.options, **dict.fromkeys(peer.absent)}
    signature, known, aligned = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], known[i,] = "constexpr", constants[name]
            continue
        if name in ("T", "scale"):
            signature[name] = "i32" if name == "T" else "fp32"
            continue
        is_wide = name in _FLOAT32 or peer.name.startswith("chunk_local")
        signature[name] = "*fp32" if is_wide else "*bf16"
        aligned[i,] = [["tt.divisibility", 16]]
    return _compiled(function, signature, known, aligned, arch, peer)


def _compiled(function: Any, signature: Any, constants: Any, attrs: Any, arch: str, peer: Peer) -> aot.Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = is_amd(arch)
    target = GPUTarget("hip" if amd else "cuda", arch if amd else capability(arch), wave_size(arch))
    options: dict[str, Any] = {"num_warps": peer.warps, "num_stages": peer.stages, "enable_fp_fusion": True}
    if not amd:
        options["ptx_version"] = max(ptx_version(arch), 80)
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=target, options=options)
    if amd:
        return aot.amd_binary(made.asm["amdgcn"], made.metadata.shared)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "kernel.ptx"
        file.write_text(made.asm["ptx"])
        return aot.nvidia_binary(file.read_bytes(), made.metadata.shared, arch)


def executed(binary: aot.Binary, trips: dict[int, int]) -> collections.Counter[str]:
    """The instructions that a warp executes, if the i-th innermost loop runs ``trips[i]`` times."""
    counts = collections.Counter(binary.instructions)
    for i, loop in enumerate(binary.loops):
        for name, count in loop.items():
            counts[name] += count * (trips.get(i, 1) - 1)
    return counts
