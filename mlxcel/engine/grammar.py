"""Output that follows a grammar: GBNF or a JSON schema, compiled once, then a mask of allowed tokens at each step.

The work is llguidance's. It owns the cache of compiled grammars and the state of each sequence's matcher. It does not
know batches: the decode batch asks for a row's mask while the model computes, and applies it. Compiling takes
milliseconds, or seconds for what is hostile, so it belongs off the event loop; what comes of it is safe anywhere.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from mlxcel.engine import gbnf
from mlxcel.engine.digits import UNLIMITED, DigitRoom, leading_digits
from mlxcel.engine.tokenizer import Tokenizer

Kind = Literal["grammar", "json_schema"]
MAX_REASON = 300
MAX_COMPILED = 32
COMPILE_SECONDS = 10.0
COMPILE_THREADS = 2
STACK = 1 << 29  # llguidance recurses over what it compiles, 12 KB a level, and an overflow kills the process
# One space after a separator, as models write JSON on one line. Free whitespace lets a small model emit nothing else.
JSON_STYLE: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What was asked, and a matcher at its beginning, which is only ever copied."""

    kind: Kind
    text: str
    matcher: LLMatcher = field(repr=False, compare=False)


class BadGrammar(ValueError):
    """Why a grammar does not compile, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(_on_one_line(reason))


class Grammars:
    """Compiles for one tokenizer. Safe in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns = threading.BoundedSemaphore(COMPILE_THREADS)
        self.compile = lru_cache(MAX_COMPILED)(self._compile)

    def constrain(self, grammar: Grammar) -> Constraint:
        """A fresh state at the grammar's beginning."""
        return Constraint(grammar, self._tokenizer, self._leading_digits)

    @cached_property
    def _leading_digits(self) -> NDArray[np.uint8]:
        known = range(min(self._tokenizer.num_known, self._tokenizer.vocab_size))
        counts = np.zeros(self._tokenizer.vocab_size, dtype=np.uint8)
        counts[known] = [leading_digits(self._tokenizer.piece(token)) for token in known]
        return counts

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        text = self._tokenizer.serialised()
        if text is None:
            raise BadGrammar("this model's tokenizer cannot constrain output: it is not of the tokenizers library")
        if not self._tokenizer.eos_ids:
            raise BadGrammar("this model cannot end constrained output: it has no end token")
        width = max(self._tokenizer.vocab_size, self._tokenizer.num_known)
        return LLTokenizer(text, n_vocab=width, eos_token=sorted(self._tokenizer.eos_ids))

    def _compile(self, kind: Kind, text: str) -> Grammar:
        """Raises BadGrammar."""
        notation = _schema(text) if kind == "json_schema" else _lark(text)
        limits = LLParserLimits(verbose_errors=False)
        matcher = self._with_deep_stack(lambda: LLMatcher(self._vocabulary, notation, log_level=0, limits=limits))
        _ = self._leading_digits  # a tenth of a second once, here and not in a decode step
        first = matcher.deep_copy()
        first.compute_bitmask()  # some that match nothing say so only here
        if first.is_error():
            raise BadGrammar(_of_translation(first.get_error()) if kind == "grammar" else first.get_error())
        return Grammar(kind, text, matcher)

    def _with_deep_stack(self, work: Callable[[], LLMatcher]) -> LLMatcher:
        """Compile in a thread of its own, which is left behind when it takes too long; few may run at a time."""
        if not self._turns.acquire(timeout=COMPILE_SECONDS):
            raise BadGrammar("other grammars are being compiled and take too long, try again later")
        done: list[LLMatcher | Exception] = []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:
                done.append(error)
            finally:
                self._turns.release()

        thread = threading.Thread(target=run, name="grammar", daemon=True)
        with _deep_stacks:
            usual = threading.stack_size(STACK)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)
        thread.join(COMPILE_SECONDS)
        if not done:
            raise BadGrammar(f"it takes more than {COMPILE_SECONDS:g} seconds to compile")
        if isinstance(done[0], Exception):
            raise done[0]
        return done[0]


_deep_stacks = threading.Lock()


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
        if schema is False:
            raise BadGrammar("nothing matches false")
        return str(LLMatcher.grammar_from_json_schema({} if schema is True else schema, overrides=JSON_STYLE))
    except (ValueError, RecursionError) as error:
        raise BadGrammar(str(error)) from None


def _lark(text: str) -> str:
    try:
        return str(LLMatcher.grammar_from_lark(gbnf.to_lark(text)))
    except gbnf.BadNotation as error:
        raise BadGrammar(str(error)) from None


def _of_translation(reason: str) -> str:
    """Lines of the Lark text mean nothing to who wrote GBNF."""
    return re.sub(r"^(at )?\d+\(\d+\): ", "", reason.split("\n")[0])


def _on_one_line(reason: str) -> str:
    """Without what llguidance adds for its authors, nor the middle of a long one, which ends with what is wrong."""
    if reason.startswith("NoExtensionBias"):
        return "nothing matches it"
    line = " ".join(reason.split("<backtrace>")[0].split("<non-verbose/>")[0].split())
    half = MAX_REASON // 2 - 3
    return line if len(line) <= MAX_REASON else f"{line[:half]} ... {line[-half:]}"


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, leading_digits: NDArray[np.uint8]) -> None:
        self.kind = grammar.kind
        self._piece = tokenizer.piece
        self._digits = DigitRoom()
        self._leading_digits = leading_digits
        self._matcher = grammar.matcher.deep_copy()
        self._width = tokenizer.vocab_size
        self._ends = np.zeros(self._width, dtype=bool)
        self._ends[sorted(tokenizer.eos_ids)] = True
        self._begun = False

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further, on one line: one of llguidance's limits on its size."""
        return _on_one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def allowed_after(self, token: int) -> NDArray[np.bool_]:
        """Mask of shape (vocab,) for the token after `token`. The first call brings the prompt's last token.

        A grammar that is complete leaves only end tokens; decode, a step ahead, still asks what follows them.
        """
        if self._begun and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._digits.push(self._piece(token))
        self._begun = True
        if self._matcher.is_stopped():
            return self._ends
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little", count=self._width).view(np.bool_)
        if self.kind == "json_schema" and self._digits.room < UNLIMITED:
            shorter = allowed & (self._leading_digits <= self._digits.room)
            allowed = shorter if shorter.any() else allowed
        return allowed if allowed.any() else self._ends
