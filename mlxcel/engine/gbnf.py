"""GBNF, the grammar notation of llama.cpp, in the Lark notation that llguidance reads.

It owns the notation and which rules become terminals, that is regular expressions: those that never lead back to
themselves. A grammar of such rules alone is one regular expression and is matched exactly; in one that recurs, a
terminal takes the longest run it can, as in any lexer. Whether the result is too large is llguidance's to say. Its
own converter is not used: it fails on escapes such as \\u00e9 and \\[, on a rule named start, on names that differ in
case alone and on a repetition of a repetition, and its terminals are greedy in grammars that do not recur, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

MAX_NESTING = 25  # llguidance takes some thirty brackets within each other

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]+|\#[^\r\n]*)+)
      | (?P<define>::=)
      | (?P<name>[A-Za-z0-9_-]+)
      | "(?P<literal>(?:\\.|[^"\\])*)"
      | \[(?P<chars>(?:\\.|[^\]\\])*)\]
      | (?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<mark>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<short>[nrt\\\"\[\]]))|(?P<plain>[^\\])",
    re.DOTALL,
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "/(?s:.)/"


class BadNotation(ValueError):
    """What is wrong and on which line."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int

    @property
    def shown(self) -> str:
        return self.text if len(self.text) <= 20 else self.text[:20] + "..."


@dataclass(frozen=True, slots=True)
class Rule:
    """`body` is Lark text, with `names` (and their lines) where other rules are named by NUL."""

    body: str
    names: tuple[Token, ...]


def to_lark(text: str) -> str:
    """Raises BadNotation."""
    rules = _Parser(list(_tokens(text))).rules()
    if "root" not in rules:
        raise BadNotation("there is no rule named root")
    for rule in rules.values():
        for token in rule.names:
            if token.text not in rules:
                raise BadNotation(f"line {token.line}: there is no rule named {token.text}")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_filled(rule, names)}" for name, rule in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines]) + "\n"


def _filled(rule: Rule, names: dict[str, str]) -> str:
    first, *rest = rule.body.split("\0")
    return first + "".join(names[token.text] + after for token, after in zip(rule.names, rest, strict=True))


def _terminals(rules: dict[str, Rule]) -> set[str]:
    """Names of the rules that lead to no cycle."""
    order = TopologicalSorter({name: {token.text for token in rule.names} for name, rule in rules.items()})
    with suppress(CycleError):
        order.prepare()
    found: set[str] = set()
    while ready := order.get_ready():
        found.update(ready)
        order.done(*ready)
    return found


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadNotation(f"line {line}: cannot be read from here: {text[at : at + 20].splitlines()[0]}")
        kind = str(match.lastgroup)
        if kind != "space":
            yield Token(kind, match[kind], line)
        line += match[0].count("\n")
        at = match.end()
    yield Token("end", "the end", line)


class _Parser:
    """Recursive descent. A rule ends where another one's `name ::=` begins, so that line ends do not matter."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._names: list[Token] = []

    def rules(self) -> dict[str, Rule]:
        """By name; of two with the same name the later counts, as in llama.cpp."""
        found: dict[str, Rule] = {}
        while self._next.kind != "end":
            name = self._take("name", "a rule's name")
            self._take("define", f"::= after {name.shown}")
            self._names = []
            found[name.text] = Rule(self._alternatives(0), tuple(self._names))
        return found

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self, kind: str, wanted: str) -> Token:
        token = self._next
        if token.kind != kind:
            raise BadNotation(f"line {token.line}: expected {wanted}, got {token.shown}")
        self._at += 1
        return token

    def _took(self, mark: str) -> bool:
        if self._next.kind != "mark" or self._next.text != mark:
            return False
        self._at += 1
        return True

    def _alternatives(self, nesting: int) -> str:
        found = [self._sequence(nesting)]
        while self._took("|"):
            found.append(self._sequence(nesting))
        return " | ".join(found)

    def _sequence(self, nesting: int) -> str:
        found = []
        while (item := self._item(nesting)) is not None:
            found.append(self._repeated(item))
        return " ".join(found) or '""'

    def _item(self, nesting: int) -> str | None:
        token = self._next
        if token.kind == "name":
            if self._tokens[self._at + 1].kind == "define":
                return None
            self._names.append(token)
            item = "\0"
        elif token.kind == "literal":
            item = json.dumps("".join(char for char, _ in _characters(token)))
        elif token.kind == "chars":
            item = _class(token)
        elif self._took("("):
            return self._group(token, nesting + 1)
        elif token.kind == "mark" and token.text == ".":
            item = _ANY
        else:
            return None
        self._at += 1
        return item

    def _group(self, opening: Token, nesting: int) -> str:
        if nesting > MAX_NESTING:
            raise BadNotation(f"line {opening.line}: more than {MAX_NESTING} brackets within each other")
        inner = self._alternatives(nesting)
        if not self._took(")"):
            raise BadNotation(f"line {opening.line}: this bracket is not closed before {self._next.shown}")
        return f"({inner})"

    def _repeated(self, item: str) -> str:
        again = False
        while self._next.kind == "repeat":
            times = "".join(self._take("repeat", "").text.split())
            if times in ("{0}", "{0,0}"):
                del self._names[len(self._names) - item.count("\0") :]
                item, again = '""', False
                continue
            item, again = (f"({item}){times}" if again else item + times), True
        return item


def _characters(token: Token) -> Iterator[tuple[str, bool]]:
    """Each character of a literal or class, and whether it was escaped."""
    at = 0
    while at < len(token.text):
        match = _CHARACTER.match(token.text, at)
        if match is None:
            raise BadNotation(f"line {token.line}: there is no escape {token.text[at : at + 2]}")
        kind = str(match.lastgroup)
        code = int(match[kind], 16) if kind in "xuU" else None
        if code is not None and (code > 0x10FFFF or 0xD800 <= code < 0xE000):
            raise BadNotation(f"line {token.line}: {match[0]} is not a character")
        char = match[kind] if code is None else chr(code)
        yield (_SHORT.get(char, char) if kind == "short" else char), kind != "plain"
        at = match.end()


def _class(token: Token) -> str:
    """[a-z_] or [^a-z_]; an escaped dash makes no range, nor does one at either end."""
    negated = token.text.startswith("^")
    chars = list(_characters(Token(token.kind, token.text[negated:], token.line)))
    if not chars:
        if negated:
            return _ANY
        raise BadNotation(f"line {token.line}: [] matches nothing")
    parts, at = [], 0
    while at < len(chars):
        first = last = chars[at][0]
        at += 1
        if chars[at : at + 1] == [("-", False)] and at + 1 < len(chars):
            last = chars[at + 1][0]
            at += 2
        if last < first:
            raise BadNotation(f"line {token.line}: the range {first}-{last} is empty")
        parts.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"
