"""Text to tokens and back, by Hugging Face's ``tokenizers``; conversations by the model's own chat template."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.sandbox
import tokenizers

from attnops_lm.origin import CONFIG, TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    import os

# The characters that byte-level tokens have for bytes: the byte itself where it is visible, others from 256 on.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = sorted(set(range(256)) - set(_VISIBLE))
_BYTES = {chr(x): x for x in _VISIBLE} | {chr(256 + i): x for i, x in enumerate(_HIDDEN)}


class Tokenizer:
    """A tokenizer and a chat template.

    Attributes:
        backend: the ``tokenizers.Tokenizer``.
        template: the chat template, as source for jinja2; None if there is none.
        tool_template: the chat template for conversations with tools; None: ``template``.
        special: names of special tokens, such as ``bos_token``, and their text.
        eos_ids: tokens that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        tool_template: str | None = None,
    ) -> None:
        self.backend, self.template, self.tool_template = backend, template, tool_template
        self.special, self.eos_ids = dict(special or {}), tuple(eos_ids)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], eos_ids: Sequence[int] = ()) -> Tokenizer:
        """From a directory with ``tokenizer.json`` and perhaps ``tokenizer_config.json`` or ``chat_template.jinja``.

        Raises:
            FileNotFoundError: there is no ``tokenizer.json``.
        """
        directory = Path(directory)
        if not (directory / TOKENIZER).exists():
            raise FileNotFoundError(
                f"{directory} has no {TOKENIZER}: copy it, and {CONFIG} with the chat template, from the folder of the "
                f"model that this one was made from, or write it by Tokenizer.save_pretrained"
            )
        backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER))
        backend.no_truncation()  # files for training may set truncation and padding
        backend.no_padding()
        config_file, template_file = directory / CONFIG, directory / TEMPLATE
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        template, tool_template = config.get("chat_template"), None
        if isinstance(template, list):  # several, with names
            by_name = {x["name"]: x["template"] for x in template}
            template, tool_template = by_name.get("default"), by_name.get("tool_use")
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if (value := config.get(name)) is not None:
                special[name] = value["content"] if isinstance(value, dict) else value
        if not eos_ids and "eos_token" in special:
            end = backend.token_to_id(special["eos_token"])
            eos_ids = () if end is None else [end]
        return cls(backend, template, special, eos_ids, tool_template)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the files that `from_pretrained` and transformers read into an existing directory."""
        directory = Path(directory)
        self.backend.save(str(directory / TOKENIZER))
        names = {"unknown_token": "unk_token"}  # GGUF's
        config: dict[str, Any] = {names.get(name, name): text for name, text in self.special.items()}
        if len(self.eos_ids) == 1:
            config["eos_token"] = self.backend.id_to_token(self.eos_ids[0])
        templates = {"default": self.template, "tool_use": self.tool_template}
        if self.tool_template is not None:
            config["chat_template"] = [{"name": x, "template": y} for x, y in templates.items() if y is not None]
        elif self.template is not None:
            config["chat_template"] = self.template
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text; special tokens in it are recognised.

        Args:
            text: the text, such as a prompt.
            add_special_tokens: whether to add the tokens with which the tokenizer begins a text. Chat templates contain
                them already.
        """
        # ``encode_batch`` lets other threads run, unlike ``encode``.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; incomplete characters become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character; empty for an id that has no token."""
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        is_added = token in self._added  # its text is not made of the characters that stand for bytes
        if not is_added and self._is_byte_level and all(x in _BYTES for x in piece):
            return bytes(_BYTES[x] for x in piece)
        if not is_added and self._has_byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        # The second time, since decoders leave out the space that a text begins with.
        once, twice = (self.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :].encode()

    @property
    def special_ids(self) -> list[int]:
        """Special tokens, which `decode` leaves out."""
        return [i for i, token in self.backend.get_added_tokens_decoder().items() if token.special]

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in self._decoder

    @functools.cached_property
    def _has_byte_fallback(self) -> bool:
        return '"ByteFallback"' in self._decoder

    @property
    def _decoder(self) -> str:
        return "" if self.backend.decoder is None else self.backend.decoder.__getstate__().decode()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation of ``{"role": …, "content": …}``, up to the beginning of the model's answer.

        Args:
            messages: the turns.
            tools: what the answer may call, as in transformers' ``apply_chat_template``.
            add_generation_prompt: whether the text ends with the beginning of an answer.

        Raises:
            ValueError: the model has no chat template.
            jinja2.TemplateError: the template refuses the conversation, such as roles that do not alternate.
        """
        source = self.tool_template if tools and self.tool_template is not None else self.template
        if source is None:
            raise ValueError("the model has no chat template; encode your own text")
        # The functions that templates may use, as in transformers.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
        template = environment.from_string(source)
        return template.render(
            messages=[dict(message) for message in messages], tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt, **self.special,
        )  # fmt: skip


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON for templates; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
