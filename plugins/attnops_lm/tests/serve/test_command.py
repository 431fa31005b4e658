"""What the command loads, and what it says where it can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from lm_server import FakeEngine
from tokenizers import models

from attnops_lm import gguf_file
from attnops_lm.model import CausalLM
from attnops_lm.origin import Origin
from attnops_lm.serve import command
from attnops_lm.testing import small
from attnops_lm.tokenizer import Tokenizer


def test_a_checkpoint_without_a_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the weights are read"))
    assert command.main(["--checkpoint", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"serve: {tmp_path} has no tokenizer.json: copy it, and tokenizer_config.json")
    assert "Traceback" not in message


def test_an_interrupt_before_the_server_is_up_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_model", interrupted)
    assert command.main([]) == 130


@pytest.mark.parametrize("status", [0, 1])
def test_programs_are_kept_and_the_servers_status_is_the_commands(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    done: list[Any] = []
    monkeypatch.setattr(command, "keep_programs", lambda folder: done.append(folder))
    monkeypatch.setattr(command, "load_model", lambda *_: (None, None))
    monkeypatch.setattr(command, "Engine", lambda *_, **__: FakeEngine())
    monkeypatch.setattr(FakeEngine, "warm", lambda _: done.append("warm"))
    monkeypatch.setattr(command, "serve", lambda *_, **options: (done.append(options["port"]), status)[1])
    assert command.main(["--compilation-cache", "off", "--port", "0"]) == status
    assert done == ["off", "warm", 0]


@pytest.mark.slow
def test_what_save_pretrained_writes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, tuned = tmp_path / "first", tmp_path / "tuned"
    small().save_pretrained(first)
    backend = tokenizers.Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    Tokenizer(backend, "{{ messages[0].content }}", {"eos_token": "~"}, [94]).save_pretrained(first)
    CausalLM.from_pretrained(first).apply_lora_to_layers(2).unwrap_lora_to_layers().save_pretrained(tuned)
    model, tokenizer = command.load_model(str(tuned), "vanilla")
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
    assert found.eos_ids == own.eos_ids
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(CausalLM.from_pretrained(again))
    )
