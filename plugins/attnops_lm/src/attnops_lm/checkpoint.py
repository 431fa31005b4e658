"""Checkpoints in Hugging Face's format: ``config.json`` and safetensors.

Weights are read and written one at a time. A checkpoint may be one file or several with an index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.flax import save_file

from attnops_lm.dtypes import floating
from attnops_lm.families import Weight, config_from_hf, config_to_hf, weights
from attnops_lm.origin import Origin
from attnops_lm.params import by_path, placed

if TYPE_CHECKING:
    import os

    from jax.sharding import Mesh

    from attnops_lm.config import Config
    from attnops_lm.model import Decoder
    from attnops_lm.sharding import PartitionRules

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


Model = TypeVar("Model")


def set_weights(model: Decoder, read: Callable[[str], jax.Array]) -> None:
    """Set every weight from a checkpoint.

    Args:
        model: the model whose weights are replaced, in its dtype and with its shardings.
        read: a function from a weight's name to the weight, in the checkpoint's layout.

    Raises:
        ValueError: a weight has another shape than the model's, or is quantised. The message has its name and both
            shapes.
    """
    for weight in mapping(model):
        value = weight.joined([read(name) for name in weight.files])
        value = value.swapaxes(-1, -2) if weight.swapped else value
        param = param_of(model, weight.path)
        if value.shape != param.shape:
            raise ValueError(
                f"{weight.name} has shape {tuple(value.shape)}, but {weight.path} has {tuple(param.shape)}: the "
                f"config does not fit the checkpoint"
            )
        floating(weight.name, value.dtype)
        old = param.get_value()  # an array, or only its shape
        param.set_value(placed(jnp.asarray(value, old.dtype), old.sharding))


def param_of(model: nnx.Module, path: str) -> Any:
    """The parameter at a path such as ``layers.0.attention.q.kernel``."""
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def mapping(model: Decoder) -> list[Weight]:
    """Every weight of a causal language model or of a classifier, and its name in transformers."""
    mapped = list(weights(model.config, lm_head=hasattr(model, "head")))
    if hasattr(model, "score"):
        mapped.append(Weight("score.kernel", "score.weight", swapped=True))
    return mapped


def config_of(model: Decoder) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a causal language model or of a classifier."""
    hf = config_to_hf(model.config)
    # Gemma3ForCausalLM reads only text, but the other classes for text have it in their names.
    text = "Text" if model.config.family == "gemma3_text" else ""
    if hasattr(model, "num_labels"):
        names = {i: f"LABEL_{i}" for i in range(model.num_labels)}
        (architecture,) = hf["architectures"]
        hf |= {
            "architectures": [architecture.replace("ForCausalLM", f"{text}ForSequenceClassification")],
            "id2label": names, "label2id": {name: i for i, name in names.items()},
        }  # fmt: skip
    elif not model.config.has_head:
        hf["architectures"] = [x.replace("ForCausalLM", f"{text}Model") for x in hf["architectures"]]
    return hf


def refuse_wrapped(model: Decoder) -> None:
    """Refuse a model with parameters that a checkpoint can't have.

    Raises:
        ValueError: there is such a parameter; the message names the first one, and says what to do.
    """
    known = {weight.path for weight in mapping(model)} | {"score.bias"}
    extra = sorted(set(by_path(nnx.state(model))) - known)
    if extra:
        raise ValueError(
            f"{extra[0]} is not in a checkpoint of {model.config.family}; call unwrap_lora_to_layers() for LoRA, and "
            f"write a model before it is quantised"
        )


def load(
    cls: type[Model],
    directory: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    partition_rules: PartitionRules | None = None,
    **options: Any,
) -> Model:
    """A model from a directory with ``config.json`` and safetensors, and perhaps ``generation_config.json``.

    Args:
        cls: the class of model, `CausalLM` or `SequenceClassifier`.
        directory: on this machine; nothing is downloaded.
        mesh: the mesh over which weights are sharded when they are read; None: one device.
        partition_rules: pairs of a regular expression of paths and a `PartitionSpec`; None for
            `attnops_lm.sharding.DEFAULT_RULES`.
        **options: operation, metadata and dtype, as for `CausalLM`; for a classifier also num_labels, if it is not the
            config's.

    Raises:
        FileNotFoundError: the directory lacks a file.
        ValueError: the family is not supported, or weights don't fit the config or are not in the model.
    """
    directory = Path(directory)
    hf = _hf_config(directory)
    config = config_from_hf(hf)
    files = _files(directory)
    pretrained: Any = cls  # a `Pretrained` too
    if pretrained.can_generate() and not config.tie_word_embeddings and _is_headless(files):
        config = config.replace(has_head=False)
    model = pretrained.lazy_init(config, **(pretrained.head_options(hf) | options))
    _refuse_unread(directory, model, files)
    if mesh is not None:
        model = model.shard_model(partition_rules, mesh)
    handles = {path: safe_open(path, framework="flax") for path in {path for path, _ in files.values()}}

    def read(name: str) -> jax.Array:
        if name not in files:
            raise ValueError(f"{directory} has no weight {name}; the config {config.family!r} needs it")
        path, own = files[name]
        return handles[path].get_tensor(own)

    set_weights(model, read)
    if HEAD in files and config.tie_word_embeddings and not jnp.array_equal(read(HEAD), read(EMBEDDING)):
        raise ValueError(
            f"tie_word_embeddings=True, but {directory} has a {HEAD} that differs from {EMBEDDING}: set it to false in "
            f"config.json, or remove the weight"
        )
    model.origin = Origin(directory)
    return model


def config_of_directory(directory: Path) -> Config:
    """The config of a directory's ``config.json``; see `load`."""
    return config_from_hf(_hf_config(directory))


def _hf_config(directory: Path) -> dict[str, Any]:
    """``config.json``, with the end tokens of ``generation_config.json``, which may have more, such as a turn's."""
    hf: dict[str, Any] = json.loads((directory / "config.json").read_text())
    generation = directory / "generation_config.json"
    if generation.exists() and (eos := json.loads(generation.read_text()).get("eos_token_id")) is not None:
        hf["eos_token_id"] = eos
    return hf


def _refuse_unread(directory: Path, model: Decoder, files: Mapping[str, object]) -> None:
    known = {name for weight in mapping(model) for name in weight.files} | ({HEAD} if hasattr(model, "head") else set())
    extra = sorted(name for name in set(files) - known if not _is_passed_over(name, model.config.family))
    if extra:
        raise ValueError(
            f"{directory} has {extra[0]} ({len(extra)} in all), which a {type(model).__name__} of its config.json, "
            f"{model.config.family!r}, does not use: config.json must belong to these weights"
        )


def _is_passed_over(name: str, family: str) -> bool:
    """Whether a weight follows from the config, or is of layers that only predict further tokens."""
    return name.endswith(".rotary_emb.inv_freq") or (family == "qwen3_next" and name.startswith("mtp."))


def _files(directory: Path) -> Mapping[str, tuple[Path, str]]:
    """The file of each weight, and the weight's name there: the files of a model without a head, such as one for
    embeddings, leave "model." out.
    """
    files = _by_own_name(directory)
    start = "model." if EMBEDDING.removeprefix("model.") in files else ""
    return {start + name: (path, name) for name, path in files.items()}


def _is_headless(files: Mapping[str, tuple[Path, str]]) -> bool:
    """Whether there is no head, and names show that there should be none."""
    return HEAD not in files and EMBEDDING in files and files[EMBEDDING][1] != EMBEDDING


def _by_own_name(directory: Path) -> Mapping[str, Path]:
    """The file of each weight. The single file takes precedence over an index, as in transformers."""
    single, index = directory / SINGLE, directory / INDEX
    if single.exists():
        with safe_open(single, framework="numpy") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}")
    return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}


def save(
    model: Decoder,
    directory: str | os.PathLike[str],
    dtype: Any = None,
    gather_fns: Mapping[str, Callable[[jax.Array], jax.Array]] | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, which `load` and transformers read, and the tokenizer.

    The tokenizer comes from the directory or file from which the model was loaded. For any other model write it with
    `Tokenizer.save_pretrained`.

    Args:
        model: the model; weights that are sharded over this process's devices are gathered.
        directory: the directory; it is created if it does not exist.
        dtype: the dtype of the weights in the file; None: as they are.
        gather_fns: by path, functions that gather a weight's shards before it is written.

    Raises:
        ValueError: the model has LoRA or quantised layers, or lacks a path of ``gather_fns``, or `load` can't read the
            dtype.
    """
    directory = Path(directory)
    refuse_wrapped(model)
    dtype = None if dtype is None else floating("float_dtype", dtype)
    gather = dict(gather_fns or {})
    if unknown := sorted(set(gather) - {weight.path for weight in mapping(model)}):
        raise ValueError(f"gather_fns has {unknown[0]}, which is not a weight's path, such as layers.0.mlp.up.kernel")
    directory.mkdir(parents=True, exist_ok=True)
    tensors, is_headless = {}, hasattr(model, "head") and not model.config.has_head
    for weight in mapping(model):
        value = param_of(model, weight.path)[...]
        value = gather.get(weight.path, lambda x: x)(value)
        value = value.swapaxes(-1, -2) if weight.swapped else value
        value = value if dtype is None else value.astype(dtype)
        for name, part in zip(weight.files, weight.split(value), strict=True):
            tensors[name.removeprefix("model.") if is_headless else name] = jnp.asarray(
                np.ascontiguousarray(jax.device_get(part))
            )
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    written = config_of(model) | {"dtype": next(iter(tensors.values())).dtype.name}
    (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    model.origin.write_tokenizer(directory)
