"""GGUF files of each architecture: logits and tokens equal the written model's.

`gguf_files` writes them as llama.cpp's converter does; llama.cpp's own logits for its converter's files of such models
were equal too, by hand, within 7e-4, with GELU rounded to float16 and the ends of GPT-OSS's YaRN rounded as there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import ARCHITECTURES, PIECES, model_of, write
from lm_model import call, close, tokens

from attnops_lm import CausalLM, gguf_file
from attnops_lm.gguf_file import config_of_gguf, load_gguf, tokenizer_of
from attnops_lm.serve.loading import parse_mesh
from attnops_lm.serve.pooling import pooling_of

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def check_equal(found: CausalLM, model: CausalLM) -> None:
    """The logits are equal; nearly, where rates were stored as −exp(A_log)."""
    ids = tokens((2, 21))
    actual, expected = call(found, ids).logits, call(model, ids).logits
    if model.config.has_linear_layers:
        close(actual, expected)
    else:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_and_the_config_are_the_models(tmp_path: Path, family: str) -> None:
    model = model_of(family, **({"sliding_window": None} if family == "mistral" else {}))
    found, tokenizer = load_gguf(write(tmp_path / "model.gguf", model))
    read, same = found.config, {"family": "llama"} if family == "mistral" else {}
    ends = {"eos_token_ids": read.eos_token_ids, "rotary": read.rotary}
    assert read == model.config.replace(**ends, **same)
    assert [(x, y.base, y.rotated_dim, y.scaling) for x, y in read.rotary] == [
        (x, y.base, y.rotated_dim, y.scaling) for x, y in model.config.rotary
    ]
    check_equal(found, model)
    assert found.embed[...].dtype == jnp.float32
    assert tokenizer.eos_ids == read.eos_token_ids == (PIECES.index("<|end|>"), PIECES.index("<|eot_id|>"))
    found.save_pretrained(tmp_path / "again")  # what was read can be written for transformers
    check_equal(CausalLM.from_pretrained(tmp_path / "again"), model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": YARN}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("qwen2", {"rope_scaling": YARN}),
        ("qwen3", {"attention_bias": True}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "default"}}),
        ("gpt_oss", {"rope_scaling": {"rope_type": "default"}}),
        ("bamba", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}}),
        ("bamba", {"mamba_conv_bias": False, "mamba_proj_bias": True}),
        ("qwen3_next", {"linear_value_head_dim": 8, "linear_num_value_heads": 6, "rope_theta": 1e7}),
    ],
)
def test_what_a_family_may_have_is_read(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = model_of(family, **changes)
    found, _ = load_gguf(write(tmp_path / "model.gguf", model))
    assert [y.scaling for _, y in found.config.rotary] == [y.scaling for _, y in model.config.rotary]
    check_equal(found, model)


def test_a_window_of_a_file_of_llama_is_mistrals(tmp_path: Path) -> None:
    model = model_of("mistral")
    found, _ = load_gguf(write(tmp_path / "model.gguf", model, llama__attention__sliding_window=8))
    assert (found.config.family, found.config.window_of(1)) == ("mistral", 8)
    check_equal(found, model)


def test_layers_with_windows_are_those_of_the_pattern(tmp_path: Path) -> None:
    def types(**fields: Any) -> str:
        path = write(tmp_path / "model.gguf", model_of("gemma3_text"), **fields)
        return "".join(x[0] for x in config_of_gguf(path).layer_types)

    assert types() == "sssssfs"
    assert types(gemma3__attention__sliding_window_pattern=3) == "ssfssfs"
    assert types(gemma3__attention__sliding_window_pattern=[True, False] * 3 + [False]) == "sfsfsff"
    assert types(gemma3__attention__sliding_window=None) == "fffffff"
    assert types(gemma3__attention__sliding_window=0, gemma3__attention__sliding_window_pattern=6) == "fffffff"


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_the_softmax_scale_of_gemma_with_27b_is_by_width(tmp_path: Path, family: str) -> None:
    model = model_of("gemma3_text" if family == "gemma3" else family, hidden_size=64)
    layers = {"gemma2": 46, "gemma3": 62}[family]
    path = write(tmp_path / "model.gguf", model, **{f"{family}__block_count": layers})
    assert config_of_gguf(path).softmax_scale == 0.25  # (64 / 4) ** -0.5
    assert config_of_gguf(write(path, model)).softmax_scale == 8**-0.5


def fused(path: Path, *names: str, axis: int = 0) -> np.ndarray:
    """Tensors of a file, one after the other."""
    values = {x.name: x.data for x in gguf.GGUFReader(path).tensors}
    return np.concatenate([values[x] for x in names], axis=axis)


def rewritten(path: Path, drop: tuple[str, ...], more: dict[str, np.ndarray]) -> Path:
    """A copy of a file without some tensors and with others."""
    reader, to = gguf.GGUFReader(path), path.with_name("rewritten.gguf")
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for name, value in ({x.name: x.data for x in reader.tensors if x.name not in drop} | more).items():
        writer.add_tensor(name, np.array(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_tensors_that_the_converter_joined_on_request_are_read(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    path = write(tmp_path / "model.gguf", model)
    names = {
        f"blk.{i}.attn_qkv.weight": [f"blk.{i}.attn_{x}.weight" for x in "qkv"]
        for i in (1, 3)[: model.config.num_layers // 2]
    }
    more = {whole: fused(path, *parts) for whole, parts in names.items()}
    drop = [x for parts in names.values() for x in parts]
    if family == "qwen3_next":
        parts = ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"]
        more["blk.0.ffn_gate_up_exps.weight"] = fused(path, *parts, axis=1)
        # Older files have the inputs of linear layers as they are in safetensors.
        more["blk.0.ssm_in.weight"] = np.asarray(model.layers[0].attention.qkvz.kernel[...]).T
        drop += [*parts, "blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"]
    found, _ = load_gguf(rewritten(path, tuple(drop), more))
    check_equal(found, model)


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = model_of("qwen3_next")
    more = {"blk.4.nextn.enorm.weight": np.ones(32, "f4"), "blk.4.attn_q.weight": np.ones((4, 4), "f4")}
    fields = {"qwen3next__block_count": 5, "qwen3next__nextn_predict_layers": 1}
    found, _ = load_gguf(write(tmp_path / "model.gguf", model, tensors=more, **fields))
    check_equal(found, model)
    with pytest.raises(ValueError, match=r"has \['blk\.4\.attn_q\.weight', 'blk\.4\.nextn\.enorm\.weight'\], which no"):
        load_gguf(write(tmp_path / "model.gguf", model, tensors=more))


def test_experts_in_mxfp4_are_read(tmp_path: Path) -> None:
    """Bytes of 32 values: a power of two, and codes of E2M1, the first 16 values in the low halves."""
    model = model_of("gpt_oss", hidden_size=32, intermediate_size=64)
    random, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.MXFP4
    raw = random.integers(0, 256, (4, 64, 17), dtype=np.uint8)  # [experts, outputs, one block of 32 inputs]
    raw[..., 0] = random.integers(120, 128, (4, 64))
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], axis=-1)
    values = np.where(codes & 8, -1, 1) * levels[codes & 7] * 2.0 ** (raw[..., :1].astype(int) - 127)
    path = write(tmp_path / "model.gguf", model, tensors={"blk.0.ffn_gate_exps.weight": (raw, kind)})
    found, _ = load_gguf(path)
    gate_up = np.asarray(found.layers[0].mlp.gate_up[...])  # [experts, inputs, gates and ups in turn]
    np.testing.assert_array_equal(gate_up[..., ::2], values.swapaxes(1, 2))
    np.testing.assert_array_equal(gate_up[..., 1::2], model.layers[0].mlp.gate_up[..., 1::2])


def test_a_file_in_parts_is_read_by_its_first_part(tmp_path: Path) -> None:
    model = model_of("llama")
    write(tmp_path / "model.gguf", model, split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [x.name for x in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found, _ = load_gguf(parts[0])
    check_equal(found, model)
    with pytest.raises(ValueError, match=r"is part 2 of 3: give the first one, .* llama-gguf-split --merge"):
        load_gguf(parts[1])
    renamed = parts[0].rename(tmp_path / "whole.gguf")
    with pytest.raises(ValueError, match=r"is part 1 of 3: give the first one, named …-00001-of-00003\.gguf"):
        load_gguf(renamed)
    renamed.rename(parts[0])
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ValueError, match=r"has split.no and split.count \(1, 3\), but must have \(2, 3\)"):
        load_gguf(parts[0])
    parts[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"is the first of 3 parts, but model-00003-of-00003.gguf are not"):
        load_gguf(parts[0])
    parts[2].write_bytes(third)
    check_equal(load_gguf(parts[0])[0], model)


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


def test_without_an_output_a_file_is_tied_unless_it_pools(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("qwen3", tie_word_embeddings=True), qwen3__pooling_type=0)
    assert (config_of_gguf(path).tie_word_embeddings, config_of_gguf(path).has_head) == (True, True)
    model = model_of("qwen3")
    whole = write(tmp_path / "whole.gguf", model, qwen3__pooling_type=3)
    assert config_of_gguf(whole).has_head
    found, _ = load_gguf(rewritten(whole, ("output.weight",), {}))
    assert not found.config.has_head
    ids = tokens((1, 9))
    np.testing.assert_array_equal(found(ids).last_hidden_state, model(ids).last_hidden_state)
    with pytest.raises(ValueError, match="the model has no head over the vocabulary"):
        found.generate(ids)


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
    model = model_of("llama", rope_scaling=scaling, rope_theta=5e5)
    divisors = llama3_divisors(5e5, 8, 32.0)
    assert (divisors[0], 1 < divisors[2] < 32, divisors[3]) == (1, True, 32)
    path = write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": divisors})
    found, _ = load_gguf(path)
    assert found.config.rotary == model.config.rotary == config_of_gguf(path).rotary
    check_equal(found, model)
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
        ({"tokenizer__ggml__pre": "gemma4"}, "tokenizer.ggml.pre='gemma4' must be one of gpt-2, smollm, refact"),
        ({"tokenizer__ggml__model": "t5"}, r"tokenizer.ggml.model='t5' must be 'gpt2' \(byte-level BPE\) or 'llama'"),
        (
            {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 4.0},
            "llama.rope.scaling.type='longrope' must be one of none, linear, yarn",
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__yarn_attn_factor": 1.0,
            },
            "yarn_attn_factor=1.0 must be YaRN's own 1.13863, or left out",
        ),
        ({"llama__rope__scaling__attn_factor": 0.5}, "attn_factor=0.5 is not computed here: it must be one of"),
        ({"llama__rope__dimension_count": 4}, r"llama.rope.dimension_count=4 is not computed here: .* \(8,\)"),
        ({"llama__rope__freq_base_swa": 5e4}, "llama.rope.freq_base_swa=50000.0 is not computed here"),
        ({"llama__attention__causal": False}, "llama.attention.causal=False is not computed here"),
        ({"llama__attention__value_length": 4}, r"llama.attention.value_length=4 is not computed here: .* \(8,\)"),
        ({"llama__attention__head_count_kv": [2, 1]}, r"head_count_kv=\[2, 1\] must be the same in all layers"),
        ({"llama__expert_count": 8}, "llama.expert_count=8 is not computed here"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale=0.5 is not computed here"),
        ({"llama__swin_norm": True}, "llama.swin_norm=True is not known here, and may change what is computed"),
        ({"llama__block_count": 3}, r"has no tensor blk\.2\.attn_q\.weight, which the architecture llama needs"),
        ({"llama__block_count": 1}, r"has \['blk\.1\.attn_k\.weight', .*, which no llama here reads"),
        ({"llama__embedding_length": None}, "has no field llama.embedding_length, which is needed"),
        ({"llama__feed_forward_length": None}, "has no field llama.feed_forward_length, which is needed"),
        ({"tokenizer__ggml__merges": None}, "has no field tokenizer.ggml.merges, which is needed"),
        ({"tokenizer__ggml__eos_token_id": None}, "has no field tokenizer.ggml.eos_token_id, which is needed"),
        ({"tokenizer__ggml__add_bos_token": True}, "has no field tokenizer.ggml.bos_token_id, which is needed"),
        ({"general__type": "adapter"}, "general.type='adapter' must be 'model': the file holds no whole model"),
        ({"general__architecture": "mamba"}, "general.architecture='mamba' must be one of llama, qwen2, qwen3"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_gguf(write(tmp_path / "model.gguf", model_of("llama"), **fields))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bamba", {"granitehybrid__rope__scaling__finetuned": False}, "rope.scaling.finetuned=False is not computed"),
        ("bamba", {"granitehybrid__residual_scale": 0.22}, "granitehybrid.residual_scale=0.2.* is not computed here"),
        ("bamba", {"granitehybrid__ssm__inner_size": 48}, "ssm.inner_size=48 must be a multiple of 32"),
        ("bamba", {"granitehybrid__attention__head_count_kv": [2, 1, 0]}, "must be 0 or one other number"),
        ("gpt_oss", {"gpt-oss__expert_gating_func": 2}, "expert_gating_func=2 is not computed here"),
        ("qwen3_next", {"qwen3next__expert_group_count": 2}, "qwen3next.expert_group_count=2 is not computed here"),
        ("qwen2", {"qwen2__attention__sliding_window": 8}, "qwen2.attention.sliding_window=8 is not computed here"),
        (
            "gemma3_text",
            {"gemma3__rope__scaling__type": "yarn"},
            "gemma3.rope.scaling.type='yarn' must be none or linear",
        ),
        ("gemma3_text", {"gemma3__attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping=50.0 is not computed"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_gguf(write(tmp_path / "model.gguf", model_of(family), **fields))


def test_rates_that_are_no_exponentials_are_refused(tmp_path: Path) -> None:
    more = {"blk.0.ssm_a": np.ones((4, 1), "f4")}
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_a must be negative, as −exp\(A_log\) is"):
        load_gguf(write(tmp_path / "model.gguf", model_of("bamba"), tensors=more))


def test_frequencies_are_not_scaled_twice(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": llama3_divisors(1e4, 8, 32.0)}
    path = write(tmp_path / "model.gguf", model_of("llama"), tensors=divisors, llama__rope__scaling__factor=4.0)
    with pytest.raises(ValueError, match=r"has rope_freqs.weight and llama.rope.scaling.factor: only one can hold"):
        load_gguf(path)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", model_of("llama")).read_bytes()
    path = tmp_path / "damaged.gguf"
    for length in (3, 20, 2000, len(whole) // 2, len(whole) - 8):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"damaged.gguf is no whole GGUF file: it has {length} bytes, but byte"):
            load_gguf(path)
    # A length of 2**60 must not be counted through: the name, the type of the array, of its items, and the length.
    name = b"tokenizer.ggml.token_type"
    at = whole.index(name) + len(name) + 8
    path.write_bytes(whole[:at] + (2**60).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(ValueError, match=r"damaged\.gguf is no whole GGUF file"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_norm.weight": np.full(32, np.nan, "f4")}, "blk.0.attn_norm.weight has NaN or infinite values"),
        ({"blk.0.attn_q.weight": np.ones((33, 32), "f4")}, "q_proj.weight has 33 rows, but the file's heads need 32"),
        ({"blk.0.attn_norm.weight": np.ones(1, "f4")}, r"input_layernorm.weight has shape \(1,\), but"),
    ],
)
def test_weights_that_can_not_be_right_are_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_gguf(write(tmp_path / "model.gguf", model_of("llama"), tensors=tensors))


@pytest.mark.parametrize(
    "name",
    ["block_count", "attention__head_count", "attention__head_count_kv", "attention__key_length", "context_length",
     "embedding_length", "feed_forward_length", "rope__freq_base", "attention__layer_norm_rms_epsilon"],
)  # fmt: skip
def test_sizes_are_above_0(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"), **{f"llama__{name}": 0})
    with pytest.raises(ValueError, match=rf"llama.{name.replace('__', '.')}=0 must be a number above 0"):
        config_of_gguf(path)
