"""`GenerationConfig`: only the fields of Hugging Face's class of this name that this package honours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

# Fields of Hugging Face's class that are not honoured, with the values that have no effect there. Any other field is
# refused unless it is None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "min_length": (0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "return_dict_in_generate": (True, False),
    "disable_compile": (False,),
    "low_memory": (False,),
    "is_assistant": (False,),
}
_ABOUT_THE_FILE = ("transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What `generate` does. Every field is honoured, or refused with a `ValueError` where it does not fit the others.

    Attributes:
        max_new_tokens: the most tokens generated per row; None: from ``max_length``, or 20.
        max_length: the most tokens per row, the prompt and its padding included; None: from ``max_new_tokens``.
        min_new_tokens: the fewest tokens before an end token may be chosen.
        do_sample: whether tokens are drawn at random; otherwise the most probable one is chosen.
        temperature: scores are divided by it. This and the next three fields need ``do_sample``.
        top_k: draws only from the tokens with the k largest scores, ties with the last included; None: all.
        top_p: draws only from the most probable tokens, as few as have this probability together; None: all.
        min_p: draws only from tokens with at least this share of the largest probability; None: all.
        repetition_penalty: scores of tokens that occur in the row are divided by it if positive, else multiplied.
        num_beams: sequences that beam search continues; 1 for none.
        length_penalty: beams are compared by log-probability / length ** length_penalty.
        early_stopping: when a beam search ends. True: once there are ``num_beams`` finished sequences. False: once no
            running one is better at its current length. "never": once none can become better at any length.
        num_return_sequences: sequences per row of the prompt, in consecutive rows.
        eos_token_id: the tokens that end a row; None: the model's; () for none.
        pad_token_id: what follows the end of a row; None: the model's, or its first end token, or 0.
        stop_strings: a row ends with the token that completes one of them; needs ``tokenizer``.
        prompt_lookup_num_tokens: tokens drafted at a time, copied from an earlier place in the row where its last
            tokens occur, and verified in one call; None for no drafts. Drafts do not change the generated tokens.
        max_matching_ngram_size: the most last tokens that are compared to find drafts.
        cache_implementation: "static" (or None): a `DenseCache` per layer; "sliding_window": a `WindowCache` in layers
            with a window; "paged": a `PagedCache` per layer.
        page_size: slots per page; only with "paged".
        prefill_chunk_size: tokens of the prompt computed at a time; None: depends on the prompt's length, at most 512.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    stop_strings: str | tuple[str, ...] | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2
    cache_implementation: Literal["static", "sliding_window", "paged"] | None = None
    page_size: int | None = None
    prefill_chunk_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):  # such as an entry of an array
                object.__setattr__(self, field.name, value.item())
            elif isinstance(value, list):
                values = (x.item() if isinstance(x, np.generic) else x for x in value)
                object.__setattr__(self, field.name, tuple(values))
        self._check_ranges()
        self._check_together()

    def _check_ranges(self) -> None:
        for name in ("max_new_tokens", "max_length", "top_k", "prompt_lookup_num_tokens", "page_size",
                     "prefill_chunk_size"):  # fmt: skip
            _integer(name, getattr(self, name), 1, optional=True)
        for name in ("num_beams", "num_return_sequences", "max_matching_ngram_size"):
            _integer(name, getattr(self, name), 1)
        _integer("min_new_tokens", self.min_new_tokens, 0)
        _integer("pad_token_id", self.pad_token_id, 0, optional=True)
        for token in self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,):
            _integer("eos_token_id", token, 0, optional=True)
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                hint = "; for the most probable token leave do_sample=False" if name == "temperature" else ""
                raise ValueError(f"{name}={value!r} must be a finite number above 0{hint}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} must be above 0 and at most 1; None for no limit")
        if not (_is_number(self.length_penalty) and math.isfinite(self.length_penalty)):
            raise ValueError(f"length_penalty={self.length_penalty!r} must be a finite number")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")
        if self.cache_implementation not in (None, "static", "sliding_window", "paged"):
            raise ValueError(
                f"cache_implementation={self.cache_implementation!r} must be 'static', 'sliding_window' or 'paged'"
            )
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ValueError(f"stop_strings={self.stop_strings!r} must be strings of at least one character")

    def _check_together(self) -> None:
        if self.max_new_tokens is not None and self.max_length is not None:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} and max_length={self.max_length} both limit a row: give one"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must be at most max_new_tokens={self.max_new_tokens}"
            )
        drawing = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None}
        for name, off in drawing.items():
            if not self.do_sample and getattr(self, name) != off:
                raise ValueError(
                    f"{name}={getattr(self, name)} is given, but do_sample=False takes the most probable token, which "
                    f"it does not change: set do_sample=True, or leave it out"
                )
        if self.page_size is not None and self.cache_implementation != "paged":
            raise ValueError(
                f"page_size={self.page_size} is given, but cache_implementation={self.cache_implementation!r} has no "
                f"pages: set it to 'paged'"
            )
        if self.num_beams > 1:
            others = {"do_sample": False, "prompt_lookup_num_tokens": None, "stop_strings": None}
            for name, off in others.items():
                if getattr(self, name) != off:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} and num_beams={self.num_beams}: beam search compares whole "
                        f"sequences of the most probable tokens; leave one out"
                    )
        else:
            beams = {"length_penalty": 1.0, "early_stopping": False}
            for name, off in beams.items():
                if getattr(self, name) != off:
                    raise ValueError(f"{name}={getattr(self, name)!r} is for beam search, but num_beams=1")
        most = self.num_beams if not self.do_sample else math.inf
        if self.num_return_sequences > most:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} must be at most num_beams={self.num_beams} without "
                f"do_sample: there are no more different sequences"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = self.stop_strings
        return () if given is None else (given,) if isinstance(given, str) else given

    def eos_ids(self, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The tokens that end a row; ``default`` if the config names none."""
        given = self.eos_token_id
        return default if given is None else (given,) if isinstance(given, int) else given

    def new_tokens(self, prompt: int) -> int:
        """The most tokens to generate after a prompt of this many tokens, its padding included.

        Raises:
            ValueError: ``max_length`` is not more than the prompt.
        """
        if self.max_length is None:
            return 20 if self.max_new_tokens is None else self.max_new_tokens
        if self.max_length <= prompt:
            raise ValueError(
                f"max_length={self.max_length} must be above the {prompt} tokens of the prompt; max_new_tokens counts "
                f"without them"
            )
        return self.max_length - prompt

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationConfig:
        """From the fields of a ``generation_config.json``. Fields that are not honoured may have values without effect.

        Raises:
            ValueError: a field that is not honoured has a value with an effect, or there is no field of this name.
        """
        return cls().updated(values)

    def updated(self, values: Mapping[str, Any]) -> GenerationConfig:
        """A copy with these fields replaced; raises as `from_dict` does."""
        known = {field.name for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                changes[name] = _default(name) if value is None else value
            elif name not in _ABOUT_THE_FILE and not (name in _NEUTRAL and value in _NEUTRAL[name]):
                if value is None:
                    continue
                what = f"may only be {' or '.join(map(repr, _NEUTRAL[name]))}" if name in _NEUTRAL else "is not known"
                raise ValueError(f"{name}={value!r}: generate honours {', '.join(sorted(known))}; {name} {what}")
        return dataclasses.replace(self, **changes)


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(GenerationConfig) if field.name == name)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(name: str, value: object, least: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}, below 2**31")
