"""`attnops serve`: what it loads, and what it says where it can't."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from lm_server import FakeEngine
from tokenizers import models
from typer.testing import CliRunner, Result

import attnops_cli
from attnops_lm import gguf_file, serve
from attnops_lm.commands import serve as command
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.serve import process
from attnops_lm.serve.limits import Limits
from attnops_lm.testing import small
from attnops_lm.tokenizer import Tokenizer


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["serve", *arguments])


def test_a_checkpoint_without_a_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the weights are read"))
    result = run("--checkpoint", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnops: {tmp_path} has no tokenizer.json: copy it, and tokenizer_config.json")


def test_an_empty_mesh_is_refused() -> None:
    result = run("--mesh", "")
    assert result.exit_code == 2
    assert "mesh='' must be axes and their sizes" in result.output


def test_an_interrupt_before_the_server_is_up_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "load_model", interrupted)
    assert run().exit_code == 130


def test_what_the_server_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnops_lm.serve.process", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    del sys.modules["attnops_lm.serve.process"]
    result = run()
    assert result.exit_code == 2
    assert result.stderr == (
        "attnops: attnops serve needs uvicorn, which is not installed: pip install 'attnops-lm[serve]'\n"
    )


@pytest.mark.parametrize("status", [0, 1])
def test_programs_are_kept_and_the_servers_status_is_the_commands(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    done: list[Any] = []
    monkeypatch.setattr(command, "keep_programs", lambda folder: done.append(folder))
    monkeypatch.setattr(serve, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(serve, "Engine", lambda *_, **__: FakeEngine())
    monkeypatch.setattr(FakeEngine, "warm", lambda _: done.append("warm"))
    monkeypatch.setattr(process, "serve", lambda *_, **options: (done.append(options["port"]), status)[1])
    assert run("--compilation-cache", "off", "--port", "0").exit_code == status
    assert done == ["off", "warm", 0]


def test_api_keys_come_from_arguments_or_the_environment_and_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(command, "keep_programs", lambda _: None)
    monkeypatch.setattr(serve, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(serve, "Engine", lambda *_, **__: FakeEngine())
    monkeypatch.setattr(FakeEngine, "warm", lambda _: None)
    monkeypatch.setattr(process, "serve", lambda *_, **options: (found.append(options["api_keys"]), 0)[1])
    monkeypatch.delenv(command.KEYS, raising=False)
    assert run().exit_code == 0
    monkeypatch.setenv(command.KEYS, "a b")
    assert run().exit_code == 0
    assert run("--api-key", "c").exit_code == 0
    assert found == [[], ["a", "b"], ["c"]]
    monkeypatch.setattr(serve, "load_model", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setenv(command.KEYS, " ")
    result = run()
    assert (result.exit_code, result.stderr) == (
        2, "attnops: ATTNOPS_API_KEY is set but has no key; unset it, or give keys\n"
    )  # fmt: skip
    result = run("--api-key", "")
    assert result.exit_code == 2
    assert result.stderr.startswith("attnops: API key 0 has 0 characters, but must have at least one")


def test_limits_of_clients_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(command, "keep_programs", lambda _: None)
    monkeypatch.setattr(serve, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(serve, "Engine", lambda *_, **__: FakeEngine())
    monkeypatch.setattr(FakeEngine, "warm", lambda _: None)
    monkeypatch.setattr(process, "serve", lambda *_, **options: (found.append(options["limits"]), 0)[1])
    assert run().exit_code == 0
    assert run("--client-answers", "2", "--client-calls", "3", "--client-tokens", "4").exit_code == 0
    assert found == [Limits(), Limits(answers=2, calls=3, tokens=4)]
    assert run("--client-tokens", "0").exit_code == 2


@pytest.mark.slow
def test_what_save_pretrained_writes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, tuned = tmp_path / "first", tmp_path / "tuned"
    small().save_pretrained(first)
    backend = tokenizers.Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    Tokenizer(backend, "{{ messages[0].content }}", {"eos_token": "~"}, [94]).save_pretrained(first)
    CausalLM.from_pretrained(first).apply_lora_to_layers(2).unwrap_lora_to_layers().save_pretrained(tuned)
    model, tokenizer = serve.load_model(str(tuned), "vanilla")
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == "a"
    assert model.generate([tokenizer.encode("a")], max_new_tokens=2, tokenizer=tokenizer).texts is not None
    # Of a GGUF file too, whose tokenizer is in it.
    again = tmp_path / "again"
    model.origin = Origin(gguf_file.smollm2_path())
    model.save_pretrained(again)
    own, found = gguf_file.load_tokenizer(), Tokenizer.from_pretrained(again)
    text = "<|im_start|>user\nWhat is 12 + 30, naïvely?<|im_end|>"
    assert found.encode(text) == own.encode(text)
    assert found.decode(found.encode(text)) == own.decode(own.encode(text))
    turns = [{"role": "user", "content": "Hello"}]
    assert found.chat(turns) == own.chat(turns)
    assert found.eos_ids == own.eos_ids[:1] == (2,), "the others are in the model's config"
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(CausalLM.from_pretrained(again))
    )
