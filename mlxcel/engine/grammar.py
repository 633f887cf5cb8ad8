"""Output that follows a grammar: GBNF or a JSON schema, compiled once, then a mask of allowed tokens at each step.

The work is llguidance's. It owns the cache of compiled grammars and the state of each sequence's matcher. It does not
know batches: the decode batch asks for a row's mask while the model computes, and applies it. Compiling takes
milliseconds to seconds (the first one also reads the whole vocabulary), so it belongs in a thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from mlxcel.engine.tokenizer import Tokenizer

Kind = Literal["grammar", "json_schema"]
MAX_REASON = 300
# One space after a separator, as models write JSON on one line. Free whitespace lets a small model emit nothing else.
JSON_STYLE: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What was asked, and llguidance's form of it."""

    kind: Kind
    text: str
    compiled: str


class BadGrammar(ValueError):
    """Why a grammar does not compile, on one line."""


class Grammars:
    """Compiles for one tokenizer. Safe in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.compile = lru_cache(64)(self._compile)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        text = self._tokenizer.serialised()
        if text is None:
            raise BadGrammar("this model's tokenizer cannot constrain output: it is not of the tokenizers library")
        width = max(self._tokenizer.vocab_size, self._tokenizer.num_known)
        return LLTokenizer(text, n_vocab=width, eos_token=sorted(self._tokenizer.eos_ids))

    def _compile(self, kind: Kind, text: str) -> Grammar:
        """Raises BadGrammar."""
        try:
            if kind == "json_schema":
                compiled = LLMatcher.grammar_from_json_schema(_object(json.loads(text)), overrides=JSON_STYLE)
            else:
                compiled = LLMatcher.grammar_from_lark(gbnf_to_lark(text))
        except Exception as error:  # a rule that is missing raises nothing more special than Exception
            raise _bad(str(error)) from None
        matcher = LLMatcher(self._vocabulary, compiled, log_level=0)
        if matcher.is_error():
            raise _bad(matcher.get_error())
        return Grammar(kind, text, compiled)

    def constrain(self, grammar: Grammar) -> Constraint:
        """A fresh state at the grammar's beginning."""
        return Constraint(LLMatcher(self._vocabulary, grammar.compiled, log_level=0), self._tokenizer)


def _object(schema: Any) -> Any:
    """The schema `true` as an object. Raises BadGrammar for `false`, which nothing satisfies."""
    if schema is False:
        raise BadGrammar("nothing satisfies the schema false")
    return {} if schema is True else schema


def _bad(reason: str) -> BadGrammar:
    line = " ".join(reason.split())
    return BadGrammar(line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "...")


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._width = tokenizer.vocab_size
        self._ends = np.zeros(self._width, dtype=bool)
        self._ends[sorted(tokenizer.eos_ids)] = True
        self._begun = False

    def allowed_after(self, token: int) -> NDArray[np.bool_]:
        """Mask of shape (vocab,) for the token after `token`. The first call brings the prompt's last token.

        Once the grammar is complete, or broken by a token that a bias forced, only end tokens are left.
        """
        if self._begun and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        self._begun = True
        if self._matcher.is_stopped():
            return self._ends
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)[: self._width] != 0
        if len(allowed) < self._width:
            allowed = np.pad(allowed, (0, self._width - len(allowed)))
        return allowed if allowed.any() else self._ends
