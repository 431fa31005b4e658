"""The weights of GGUF files by Hugging Face's names: what llama.cpp's converter changes is undone.

It orders the rows of q and k of some architectures so that features (2i, 2i + 1) rotate together, where Hugging Face
has (i, i + D / 2); it adds 1 to the scales of norms that multiply by 1 + weight; it stores rates as −exp(A_log), and
experts in one tensor each for gates, ups and downs.
"""

from __future__ import annotations

import re
from typing import Any, Final

import gguf
import numpy as np

from attnops_lm.config import Config
from attnops_lm.gguf.file import GGUFFile

_PAIRED: Final = {"llama", "granitehybrid"}  # rows of q and k are in the order of pairs
_SHIFTED: Final = {"gemma2", "gemma3", "qwen3next"}  # 1 is added to the scales of norms
_NOT_SHIFTED: Final = "linear_attn.norm.weight"
# Names before llama.cpp's converter looks them up in gguf's table.
_RENAMED: Final = {".dt_bias": ".dt_proj.bias", ".sinks": ".sinks.weight", "_proj_bias": "_proj.bias"}
_EXPERT: Final = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_GATE_UP: Final = re.compile(r"(.*\.mlp\.experts)\.gate_up_proj(_bias)?")  # GPT-OSS's
_QKV: Final = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")


class Tensors:
    """A function from a weight's name to the weight in float32, as it is in safetensors.

    A call needs the memory of that weight, twice while it is reordered.
    """

    def __init__(self, file: GGUFFile, config: Config) -> None:
        self.file, self.config = file, config
        found = [x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
        if not found:
            raise ValueError(f"the installed gguf has no architecture {file.architecture}: update gguf")
        self.names = gguf.get_tensor_name_map(found[0], config.num_layers)

    def __call__(self, name: str) -> np.ndarray:
        """The weight of this name.

        Raises:
            ValueError: a tensor is missing, or gguf can't convert it.
        """
        if expert := _EXPERT.fullmatch(name):
            return self._expert(expert[1], int(expert[2]), expert[3])
        if gate_up := _GATE_UP.fullmatch(name):
            kind = "bias" if gate_up[2] else "weight"
            gate, up = (self._read(f"{gate_up[1]}.{x}_proj.{kind}") for x in ("gate", "up"))
            value = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
            return value if gate_up[2] else value.swapaxes(1, 2)
        if name.endswith(".experts.down_proj"):
            return self._read(f"{name}.weight").swapaxes(1, 2)
        if name.endswith(".in_proj_qkvz.weight"):
            return self._delta_inputs(name)
        if part := _QKV.fullmatch(name):
            return self._attention_input(name, *part.groups())
        return self._undone(name, self._read(name))

    def refuse_unread(self) -> None:
        """Raise `ValueError` if a tensor is left. Layers that only predict further tokens are not part of the model."""
        more = tuple(f"blk.{i}." for i in range(self.config.num_layers, self._blocks()))
        unread = sorted(x for x in self.file.tensors.keys() - self.file.used if not x.startswith(more))
        if unread:
            raise ValueError(f"{self.file.path} has {unread}, which no {self.config.family} here reads")

    def _blocks(self) -> int:
        """How many layers the file has, with those that only predict further tokens."""
        fields, name = self.file.fields, self.file.architecture
        return self.config.num_layers + int(fields.get(f"{name}.nextn_predict_layers", 0))

    def _name(self, name: str) -> str:
        for old, new in _RENAMED.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name.endswith((".A_log", ".mamba.D")):  # without a suffix in GGUF
            return str(self.names.get_name(name))
        module, _, kind = name.rpartition(".")
        return f"{self.names.get_name(module)}.{kind}"

    def _read(self, name: str, part: Any = slice(None)) -> np.ndarray:
        return self.file.read(self._name(name), part)

    def _undone(self, name: str, value: np.ndarray) -> np.ndarray:
        if name.endswith("norm.weight") and not name.endswith(_NOT_SHIFTED) and self.file.architecture in _SHIFTED:
            return value - 1
        if name.endswith(".A_log"):
            if not (value < 0).all():
                raise ValueError(f"{self.file.path}: {self._name(name)} must be negative, as −exp(A_log) is")
            return np.log(-value).reshape(-1)
        if name.endswith((".mamba.D", ".mamba.norm.weight")):
            return value.reshape(-1)
        if name.endswith(".conv1d.weight"):
            return value[:, None, :]
        if name.endswith(".shared_expert_gate.weight"):
            return value.reshape(1, -1)
        return value

    def _attention_input(self, name: str, module: str, which: str, kind: str) -> np.ndarray:
        config = self.config
        K, D = config.num_kv_heads, config.head_dim
        rows = {"q": config.num_heads * D * (1 + config.attention_gate), "k": K * D, "v": K * D}
        fused = self._name(f"{module}.q_proj.{kind}").replace("attn_q.", "attn_qkv.")
        if fused in self.file.tensors and self._name(name) not in self.file.tensors:
            start = sum(rows[x] for x in "qkv"[: "qkv".index(which)])
            value = self.file.read(fused, slice(start, start + rows[which]))
        else:
            value = self._read(name)
        if len(value) != rows[which]:
            raise ValueError(f"{self.file.path}: {name} has {len(value)} rows, but the file's heads need {rows[which]}")
        if which == "v" or self.file.architecture not in _PAIRED:
            return value
        heads = config.num_heads if which == "q" else K
        return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)

    def _expert(self, module: str, expert: int, which: str) -> np.ndarray:
        name = self._name(f"{module}.{which}_proj.weight")
        fused = re.sub(r"_(gate|up)_exps", "_gate_up_exps", name)
        if name in self.file.tensors or fused not in self.file.tensors:
            return self.file.read(name, expert)
        gate, up = np.split(self.file.read(fused, expert), 2)
        return gate if which == "gate" else up

    def _delta_inputs(self, name: str) -> np.ndarray:
        """Queries, keys, values and gates of each key head together, where the file has all queries first."""
        whole = self._name(name)
        if whole in self.file.tensors:  # in older files
            return self.file.read(whole)
        sizes = self.config.linear
        assert sizes is not None
        keys, K = sizes.key_heads * sizes.head_dim, sizes.key_heads
        qkv = self.file.read(whole.replace("ssm_in", "attn_qkv"))
        z = self.file.read(whole.replace("ssm_in", "attn_gate"))
        parts = [x.reshape(K, -1, x.shape[1]) for x in (*np.split(qkv, [keys, 2 * keys]), z)]
        return np.concatenate(parts, axis=1).reshape(-1, z.shape[1])
