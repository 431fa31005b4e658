"""What the server loads: dtypes, quantised weights, and models over a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import models

from attnops_caches import PagedCache
from attnops_lm.families import config_from_hf
from attnops_lm.serve import Engine, Request, load_model
from attnops_lm.serve.grammar import Grammars, regex_rule
from attnops_lm.serve.loading import check_mesh, parse_mesh
from attnops_lm.testing import SIZES, small
from attnops_lm.tokenizer import Tokenizer

PROMPTS = [5, 6, 7, 8, 9, 10, 11], [5, 6, 7]


def saved(directory: Path, **sizes: Any) -> str:
    given = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 64} | sizes
    small(**given).save_pretrained(directory)
    backend = tokenizers.Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    Tokenizer(backend, None, {"eos_token": "~"}, [94]).save_pretrained(directory)
    return str(directory)


def answers(*given: Any) -> list[list[int]]:
    """The tokens of two requests, by a model with these arguments of `load_model`; the second follows a grammar. Checks
    where the model's pages are.
    """
    model, tokenizer = load_model(*given)
    engine = Engine(model, tokenizer, rows=2, pages=32, page_size=8, max_length=64, chunks=[16])
    # This tokenizer has a space before each token.
    letters = Grammars(tokenizer, engine.vocab_size).constraint(regex_rule("( [a-z]){12}"))
    requests = [Request(list(PROMPTS[0]), 12), Request(list(PROMPTS[1]), 12, constraint=letters)]
    engine.submit(*requests)
    while engine.step():
        pass
    pages = engine.caches[0]
    assert isinstance(pages, PagedCache)
    kv_heads = {shard.data.shape[1] for shard in pages.store.key.addressable_shards}
    mesh = model.metadata.mesh
    assert kv_heads == {4 if mesh is None else 4 // mesh.shape["tp"]}
    assert engine.counts["traces"] == 2
    assert all("a" <= chr(32 + token) <= "z" for token in requests[1].tokens[len(PROMPTS[1]) :])
    return [request.tokens for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_a_model_over_a_mesh_answers_as_on_one_device(tmp_path: Path, quantize: str | None) -> None:
    checkpoint = saved(tmp_path)
    expected = answers(checkpoint, "flash", "float32", quantize)
    assert answers(checkpoint, "flash", "float32", quantize, parse_mesh("tp=4")) == expected


@pytest.mark.slow
def test_weights_and_pages_have_the_dtype(tmp_path: Path) -> None:
    model, tokenizer = load_model(saved(tmp_path), "flash", "bfloat16", "int8")
    assert model.embed[...].dtype == model.layers[0].attention_norm.scale[...].dtype == jnp.bfloat16
    assert model.layers[0].mlp.up.qvalue[...].dtype == jnp.int8
    engine = Engine(model, tokenizer, rows=2, pages=32, page_size=8, max_length=64, chunks=[16])
    pages = engine.caches[0]
    assert isinstance(pages, PagedCache)
    assert pages.dtype == jnp.bfloat16


@pytest.mark.slow
def test_inputs_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down has 48 inputs, which must be a multiple of group=32"):
        load_model(saved(tmp_path, intermediate_size=48), "flash", "float32", "int4")


def test_the_axes_of_a_mesh() -> None:
    mesh = parse_mesh("ep=2, tp=4")
    assert dict(mesh.shape) == {"ep": 2, "tp": 4}
    assert list(mesh.devices.flat) == jax.devices()[:8]
    assert parse_mesh("tp=2").size == 2


def test_a_mesh_that_a_model_can_not_share_is_refused_or_told(caplog: pytest.LogCaptureFixture) -> None:
    config = config_from_hf({"model_type": "llama"} | SIZES)  # with two heads of keys
    with pytest.raises(ValueError, match="ep=2 must be 1 for a model without experts"):
        check_mesh(config, parse_mesh("ep=2,tp=2"))
    check_mesh(config, parse_mesh("ep=1,tp=2"))
    assert not caplog.records
    check_mesh(config, parse_mesh("tp=4"))
    assert "num_kv_heads=2 is not divisible by tp=4" in caplog.text


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "tp=-1", "tp=two", "dp=2", "tp=2,tp=2", "tp=2;ep=2"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be axes and their sizes, such as 'tp=4' or 'ep=2,tp=4', each once"):
        parse_mesh(text)


@pytest.mark.slow
def test_a_mesh_for_experts_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    for path in (checkpoint, None):
        with pytest.raises(ValueError, match="ep=2 must be 1 for a model without experts"):
            load_model(path, "flash", mesh=parse_mesh("ep=2,tp=2"))


def test_what_can_not_be_loaded_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mesh='tp=999' needs 999 devices, but JAX has 8 of cpu"):
        parse_mesh("tp=999")
    for given, message in (
        (("float31",), "dtype='float31' is no dtype; use float32, bfloat16 or float16"),
        (("int8",), "dtype is int8, but must be floating-point of at least 16 bits"),
        (("float32", "int3"), "quantize='int3' must be one of int8, int4"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(str(tmp_path), "flash", *given)
