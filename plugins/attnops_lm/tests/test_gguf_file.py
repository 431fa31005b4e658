"""GGUF files of each architecture: logits and tokens equal the written model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from lm_model import call, tokens
from safetensors.numpy import load_file

from attnops_lm import gguf_file
from attnops_lm.gguf_file import ARCHITECTURES, config_of_gguf, load_gguf, tokenizer_of
from attnops_lm.model import CausalLM
from attnops_lm.serve.loading import parse_mesh
from attnops_lm.serve.pooling import pooling_of
from attnops_lm.testing import small
from attnops_lm.tokenizer import _BYTES

pytestmark = pytest.mark.slow

SPLITS = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
# A byte each, merges, and two added tokens.
PIECES = [*_BYTES, "12", "123", "Ġa", "<|eot_id|>", "<|begin|>", "<|end|>", "<tool_call>"]
CONTROL, USER_DEFINED = 3, 4


def model_of(family: str) -> CausalLM:
    changes = {"tie_word_embeddings": False, "vocab_size": len(PIECES), "head_dim": 8}
    model = small("llama", **changes) if family == "llama" else small("llama", **(changes | {"model_type": family}))
    assert model.config.family == family
    return model


def write(path: Path, model: CausalLM, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """The model as llama.cpp's converter writes it, and more tensors; ``fields`` are set last, or left out if None."""
    c = model.config
    model.save_pretrained(path.parent)
    weights = load_file(path.parent / "model.safetensors")
    writer = gguf.GGUFWriter(path, c.family)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(dict(c.rotary)["full_attention"].base)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITS[c.family])
    writer.add_token_list(PIECES)
    writer.add_token_types([1] * (len(PIECES) - 4) + [CONTROL] * 3 + [USER_DEFINED])
    writer.add_token_merges(["1 2", "12 3", "Ġ a"])
    writer.add_eos_token_id(PIECES.index("<|end|>"))
    for name, value in fields.items():
        if value is None:
            for data in writer.kv_data:
                data.pop(name.replace("__", "."), None)
            continue
        writer.add_key_value(name.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    (architecture,) = (x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == c.family)
    names = gguf.get_tensor_name_map(architecture, c.num_layers)
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if ARCHITECTURES[c.family] and (".q_proj" in name or ".k_proj" in name):
            heads = c.num_heads if ".q_proj" in name else c.num_kv_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"{names.get_name(module)}.{kind}", np.ascontiguousarray(value, np.float32))
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_and_the_config_are_the_models(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    found, tokenizer = load_gguf(write(tmp_path / "model.gguf", model))
    assert found.config.rotary == model.config.rotary
    assert (found.config.head_dim, found.config.qkv_bias) == (8, family == "qwen2")
    ids = tokens((2, 9))
    np.testing.assert_allclose(call(found, ids).logits, call(model, ids).logits, rtol=1e-5, atol=1e-5)
    assert found.embed[...].dtype == jnp.float32
    assert tokenizer.eos_ids == found.config.eos_token_ids == (PIECES.index("<|end|>"), PIECES.index("<|eot_id|>"))


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", ["It", "'ll", "Ġcost", "Ġ", "123", "45", "ĊĊ", "Ġ", "ĠÃ©", "Ġa"]),
        ("qwen2", ["It", "'ll", "Ġcost", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġ", "ĠÃ©", "Ġa"]),
    ],
)
def test_text_is_split_as_the_family_does(tmp_path: Path, family: str, wanted: list[str]) -> None:
    path = write(tmp_path / "model.gguf", model_of(family))
    _, tokenizer = load_gguf(path)
    text = "It'll cost 12345\n\n  é a"
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in pieces] == wanted
    found = [PIECES[i] for i in tokenizer.encode(text)]
    assert "".join(found) == "".join(wanted)
    assert ("123" in found, found[-1]) == (family == "llama", "Ġa")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Neither is split, and only one is special.
    ids = tokenizer.encode("<tool_call>a<|end|>")
    assert [PIECES[i] for i in ids] == ["<tool_call>", "a", "<|end|>"]
    assert tokenizer.decode(ids) == "<tool_call>a"


def test_texts_begin_with_the_token_that_the_file_says(tmp_path: Path) -> None:
    begin, a = PIECES.index("<|begin|>"), PIECES.index("a")
    for family, add, wanted in (
        ("llama", None, [begin, a]), ("llama", False, [a]), ("qwen2", None, [a]), ("qwen2", True, [begin, a]),
    ):  # fmt: skip
        fields: dict[str, Any] = {"tokenizer__ggml__bos_token_id": begin, "tokenizer__ggml__eot_token_id": 7}
        if add is not None:
            fields["tokenizer__ggml__add_bos_token"] = add
        tokenizer = tokenizer_of(write(tmp_path / "model.gguf", model_of(family), **fields))
        assert tokenizer.encode("a", add_special_tokens=True) == wanted
        assert tokenizer.encode("a") == [a]
        assert tokenizer.eos_ids == (PIECES.index("<|end|>"), 7, PIECES.index("<|eot_id|>"))


@pytest.mark.parametrize(("pooling", "way"), [(None, "last"), (0, "last"), (1, "mean"), (3, "last"), (2, None)])
def test_a_model_for_embeddings_ends_texts_and_says_how_to_pool(
    tmp_path: Path, pooling: int | None, way: str | None
) -> None:
    fields: dict[str, Any] = {"tokenizer__ggml__add_eos_token": True}
    if pooling is not None:
        fields["qwen3__pooling_type"] = pooling
    path = write(tmp_path / "model.gguf", model_of("qwen3"), **fields)
    assert tokenizer_of(path).encode("a", add_special_tokens=True) == [PIECES.index("a"), PIECES.index("<|end|>")]
    if way is not None:
        assert pooling_of(str(path)) == way
        return
    with pytest.raises(ValueError, match="has pooling_type=2, but the server pools by one of last, mean"):
        pooling_of(str(path))


def llama3_divisors(base: float, D: int, factor: float) -> np.ndarray:
    """By the formula of llama.cpp's converter, token by token."""
    divisors = []
    for frequency in base ** -(np.arange(0, D, 2) / D):
        length = 2 * np.pi / frequency
        blend = (8192 / length - 1) / (4 - 1)
        between = 1 / ((1 - blend) / factor + blend)
        divisors.append(1.0 if length < 8192 / 4 else factor if length > 8192 else between)
    return np.asarray(divisors, np.float32)


def test_frequencies_of_llama_3_1_are_read(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }  # fmt: skip
    changes = {"vocab_size": len(PIECES), "head_dim": 8, "tie_word_embeddings": False, "rope_theta": 5e5}
    model = small("llama", rope_scaling=scaling, **changes)
    divisors = llama3_divisors(5e5, 8, 32.0)
    assert (divisors[0], 1 < divisors[2] < 32, divisors[3]) == (1, True, 32)
    path = write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": divisors})
    found, _ = load_gguf(path)
    assert found.config.rotary == model.config.rotary == config_of_gguf(path).rotary
    ids = tokens((2, 9))
    np.testing.assert_allclose(call(found, ids).logits, call(model, ids).logits, rtol=1e-5, atol=1e-5)
    sharded, _ = load_gguf(path, mesh=parse_mesh("tp=2"))
    up = sharded.layers[0].mlp.up.kernel[...]
    assert [x.data.shape for x in up.addressable_shards] == [(32, 24)] * 2
    np.testing.assert_array_equal(up, model.layers[0].mlp.up.kernel[...])


def test_weights_are_not_read_if_frequencies_are_scaled_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "set_weights", None)
    divisors = {"rope_freqs.weight": np.arange(1, 5, dtype="f4")}
    path = write(tmp_path / "model.gguf", model_of("llama"), tensors=divisors)
    with pytest.raises(
        ValueError, match=r"rope_freqs\.weight divides rotary frequencies by 1 to 4, and not as Llama 3"
    ):
        load_gguf(path)


def test_a_tensor_that_gguf_can_not_convert_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any) -> Any:
        raise NotImplementedError("no such type")

    path = write(tmp_path / "model.gguf", model_of("llama"))
    monkeypatch.setattr(gguf, "dequantize", convert)
    with pytest.raises(ValueError, match=r"gguf can't convert .*\.weight, F32: no such type"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer__ggml__pre": "gemma4"}, "tokenizer.ggml.pre='gemma4' must be one of smollm, qwen2, llama-bpe"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn' is not read from GGUF files"),
        ({"llama__attention__causal": False}, "llama.attention.causal=False is not read from GGUF files"),
        ({"llama__expert_count": 8}, "llama.expert_count=8 is not read from GGUF files; use safetensors"),
        ({"llama__block_count": 3}, r"has no tensor blk\.2\.attn_q\.weight, or it is read twice"),
        ({"llama__block_count": 1}, r"has \['blk\.1\.attn_k\.weight', .*, which no llama here reads"),
        ({"llama__rope__scaling__factor": 8.0}, "llama.rope.scaling.factor=8.0 is not read from GGUF files"),
        ({"llama__rope__scale_linear": 4.0}, "llama.rope.scale_linear=4.0 is not read from GGUF files"),
        ({"llama__embedding_length": None}, "has no field llama.embedding_length, which is needed"),
        ({"tokenizer__ggml__merges": None}, "has no field tokenizer.ggml.merges, which is needed"),
        ({"tokenizer__ggml__eos_token_id": None}, "has no field tokenizer.ggml.eos_token_id, which is needed"),
        ({"tokenizer__ggml__add_bos_token": True}, "has no field tokenizer.ggml.bos_token_id, which is needed"),
        ({"general__architecture": "mamba"}, "general.architecture='mamba' must be one of llama, qwen2, qwen3"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_gguf(write(tmp_path / "model.gguf", model_of("llama"), **fields))
