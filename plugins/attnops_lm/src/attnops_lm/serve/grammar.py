"""Answers that follow a grammar, by llguidance: which tokens may come next."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

if TYPE_CHECKING:
    from attnops_lm.tokenizer import Tokenizer

# White space between two tokens of JSON is limited, since a model could go on with it until its last token.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n\r\t]{1,40}"}}
# The model chooses how a text is divided into tokens.
_HEADER = '%llguidance {"no_forcing": true}\n'
_NO_TOKEN = "the vocabulary has no token that can come next"
_LIMITS = LLParserLimits(verbose_errors=False)
MAX_NUMBER = 2**53 - 1  # llguidance rounds larger integers to float64, or to the largest of int64
_CONSTANT = ("const", "enum")
_COMPARED = (*_CONSTANT, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_MULTIPLE = 10_000  # llguidance has a state, 0.4 kB, for each remainder of ``multipleOf``


def json_rule(schema: dict[str, Any]) -> str:
    """JSON that fits a JSON schema, for a rule in Lark's format.

    Raises:
        ValueError: its values of ``multipleOf`` need too many states, or a number in it is too large.
    """
    check_numbers(schema)
    return f"%json {json.dumps(schema | _JSON_OPTIONS)}"


def check_numbers(schema: Any) -> None:
    """Raise `ValueError` if the values of ``multipleOf`` in a schema, or in a list of schemas, have too large a least
    common multiple, if a number with which values are compared is beyond `MAX_NUMBER`, or if llguidance would accept a
    number that is excluded.
    """
    values: set[Fraction] = set()
    for keyword, x in _numbers(schema):
        if keyword == "multipleOf":
            values |= {Fraction(repr(x))} if x and math.isfinite(x) else set()  # llguidance refuses others
        elif abs(x) > MAX_NUMBER:
            raise ValueError(f"{keyword}: {x} must be from -(2**53 - 1) to 2**53 - 1; send a smaller number, or none")
    scale = 1  # llguidance multiplies fractions by a power of ten, so that all are whole
    while any(scale % x.denominator for x in values):
        scale *= 10
    multiple = 1
    for value in values:
        multiple = math.lcm(multiple, int(value * scale))
        if multiple > MAX_MULTIPLE:
            shown = multiple if multiple < 10**20 else "a number of more than 20 digits"
            times = f" in units of {1 / scale}" if scale > 1 else ""
            raise ValueError(
                f"the least common multiple of the values of multipleOf, {shown}{times}, must be at most "
                f"{MAX_MULTIPLE}; send smaller values, or none"
            )


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """The numbers in values of the keywords that compare, and the keywords."""
    left = [("", schema)]  # no recursion, which deep schemas would exceed
    while left:
        keyword, part = left.pop()
        if isinstance(part, dict):
            if keyword not in _CONSTANT:
                _check_excluded(part)
            left.extend((keyword if keyword in _CONSTANT else name, x) for name, x in part.items())
        elif isinstance(part, list):
            left.extend((keyword, x) for x in part)
        elif keyword in _COMPARED and _is_number(part):
            yield keyword, part


def _check_excluded(schema: dict[str, Any]) -> None:
    """Raise `ValueError` if a whole number is excluded, and the other bound has the same digits before the point, such
    as above 0 and at most 0.5: llguidance would accept it.
    """
    for sign, excluded, others in (
        (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        x = schema.get(excluded)
        for other in others:
            y = schema.get(other)
            if _is_number(x) and _is_number(y) and x % 1 == 0 and sign * x >= 0 and sign * y < sign * x + 1:
                rule = f"send {excluded[9:].lower()} with a number beside {x}"
                raise ValueError(f"{excluded}: {x} with {other}: {y} is not served; {rule}")


def _is_number(x: Any) -> TypeGuard[int | float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


def regex_rule(regex: str) -> str:
    """A text that a regular expression matches as a whole, for a rule in Lark's format.

    Raises:
        ValueError: the expression ends with a backslash, or has line ends that are not part of the text.
            `Grammars.constraint` raises for other errors in it.
    """
    if "\n" in regex and re.search(r"\(\?[A-Za-z]*x", regex):  # Lark has ``\n`` for them, which would be text
        raise ValueError("the flag x is not served with line ends; write the expression in one line")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would leave it out
        raise ValueError("the expression ends with a backslash that escapes nothing")
    return f"/{regex_to_lark(regex, '')}/"


def choice_rule(choices: Sequence[str]) -> str:
    """One of several texts, for a rule in Lark's format."""
    # A terminal, which is one automaton: of a rule, llguidance would try each text, and at most 2,000.
    return f"CHOICE\nCHOICE: {' | '.join(json.dumps(x, ensure_ascii=False) for x in choices)}"


class Constraint:
    """The state of one answer that follows a grammar.

    Attributes:
        allowed: uint32 [ceil(V / 32)], a bit for each token that may come next, the lowest bit first. Tokens that end
            the text are among them where the grammar allows the end.
        is_complete: whether the answer follows the grammar and nothing can be added.
        failure: why no token is allowed although the answer is incomplete; None: this is not the case.
    """

    def __init__(self, matcher: LLMatcher, bits: np.ndarray, vocab_size: int) -> None:
        self._matcher, self._bits, self._vocab_size = matcher, bits, vocab_size
        self._find()

    def push(self, token: int) -> None:
        """Add an allowed token that does not end the text."""
        self._matcher.consume_token(token)
        self._find()

    def copy(self) -> Constraint:
        """The constraint of another answer, from the same state."""
        return Constraint(self._matcher.deep_copy(), self._bits.copy(), self._vocab_size)

    def _find(self) -> None:
        self.is_complete, self.failure = False, None
        if not self._matcher.is_error():
            self.is_complete = self._matcher.is_stopped()
            fill_next_token_bitmask(self._matcher, self._bits)
        words = math.ceil(self._vocab_size / 32)
        self.allowed = self._bits.view(np.uint32)[0, :words].copy()
        self.allowed[-1] &= np.uint32(0xFFFFFFFF >> (32 * words - self._vocab_size))  # ids without logits
        if self._matcher.is_error():
            error = self._matcher.get_error().partition("\n")[0]
            self.failure = _NO_TOKEN if "NoExtension" in error else error
        elif not self.allowed.any():
            self.is_complete = self.is_complete or self._matcher.is_accepting()
            self.failure = None if self.is_complete else _NO_TOKEN


class Grammars:
    """The constraints of a tokenizer's texts.

    The first one needs the bytes of all tokens, some 10 µs each.

    Args:
        tokenizer: the tokenizer. Its tokens from ``vocab_size`` on are never allowed, and neither are ids without a
            token.
        vocab_size: V, the number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        ends = [x for x in self.tokenizer.eos_ids if x < self.vocab_size]
        wrapper = TokenizerWrapper(_Vocabulary(self.tokenizer, self.vocab_size, ends))
        return LLTokenizer(wrapper, eos_token=ends or None)

    def constraint(self, rule: str) -> Constraint:
        """The constraint of an answer's first token.

        Args:
            rule: what the whole answer is, such as from `json_rule`.

        Raises:
            ValueError: llguidance refuses the grammar, or no token can be the first.
        """
        matcher = LLMatcher(self._vocabulary, f"{_HEADER}start: {rule}", log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        found = Constraint(matcher, allocate_token_bitmask(1, self._vocabulary.vocab_size), self.vocab_size)
        if found.failure is not None or not found.allowed.any():
            raise ValueError(found.failure or "only an empty answer fits it")
        return found


class _Vocabulary:
    """The members that llguidance reads; without a token that ends a text it adds one, which has no logit."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [x for x in {*tokenizer.special_ids, *ends} if x < vocab_size]
        self.eos_token_id = ends[0] if ends else None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # only grammars that force tokens call it
