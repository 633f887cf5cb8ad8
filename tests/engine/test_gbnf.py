"""GBNF as llama.cpp reads it: which texts a grammar accepts, by llguidance itself on the tiny byte tokenizer."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.gbnf import BadNotation, to_lark
from mlxcel.engine.grammar import Grammars
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER)

JSON = r"""
root   ::= object   # comments, blank lines and line ends do not matter
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(grammar: str, text: str) -> bool:
    matcher = GRAMMARS.compile("grammar", grammar).matcher.deep_copy()
    tokens = list(TOKENIZER.encode(text, add_special=False))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "bc"', ["a", "bc"], ["", "b", "abc"]),
        ('root ::= "\\u00e9\\U0001F600\\x41\\n\\t\\\\\\"\\[\\]"', ['é😀A\n\t\\"[]'], ["e"]),
        ("root ::= [a-c_] [^a-c] .", ["_zx", "ad\n"], ["ddd", "aax"]),
        ("root ::= [-a] [a-] [\\]x] [\\x2d\\u4e00-\\u4eff]", ["-a]-", "a-x中"], ["bax中"]),
        ("root ::= [^]", ["]", "\n"], [""]),
        ('root ::= "a"{2} "b"{1,} "c"{0,1} "d"{0} "e"{ 0 , 0 }', ["aab", "aabbc"], ["abc", "aabcd", "aae"]),
        ('root ::= ("a"{1,2}){2}? x{0} y+?\nx ::= "x"\ny ::= "y"', ["", "aa", "aaaay"], ["a", "x"]),
        ('root::=start aB a-b A_B\nstart::="s" aB ::= "1" a-b ::= "2" A_B ::= "3"', ["s123"], ["s"]),
        ('root ::= "a"\n  | "b"\nroot2 ::= "c"', ["a", "b"], ["c"]),
        ('root ::= "old"\nroot ::= "new"', ["new"], ["old"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= | [0-9] root", ["", "12"], ["a"]),
        ('root ::= root "+" [0-9] | [0-9]', ["1", "1+2+3"], ["+"]),
        (JSON, ['{"a": [1, -2.5e1, "x\\n\\u00e9"], "b":{}}'], ["[]", '{"a":01}', "{'a':1}"]),
    ],
)  # fmt: skip
def test_a_grammar_accepts_its_words_and_no_others(grammar, good, bad):
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_what_follows_a_long_run_may_begin_like_it():
    assert accepts('root ::= word "a"\nword ::= [a-z]+', "bananaa")


def test_a_control_token_is_not_the_text_it_is_written_as():
    assert not accepts('root ::= "<|im_end|>"', "<|im_end|>")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "there is no rule named root"),
        ('rot ::= "a"', "there is no rule named root"),
        ("root ::= a\na ::=\n  b", "line 3: there is no rule named b"),
        ('root ::= "a', 'line 1: cannot be read from here: "a'),
        ("root ::= 'a'", "line 1: cannot be read from here: 'a'"),
        ('\n\nroot = "a"', 'line 3: cannot be read from here: = "a"'),
        ('root ::= ("a"', "line 1: this bracket is not closed before the end"),
        ('root ::= "a" )', "line 1: expected a rule's name, got )"),
        ('root "a"', "line 1: expected ::= after root, got a"),
        ('root ::= "\\q"', "line 1: there is no escape \\q"),
        ('root ::= "\\ud800"', "line 1: \\ud800 is not a character"),
        ("root ::= [z-a]", "line 1: the range z-a is empty"),
        ("root ::= []", "line 1: [] matches nothing"),
        ("root ::= " + "(" * 26 + '"a"' + ")" * 26, "line 1: more than 25 brackets within each other"),
        ("root ::= <think>", "line 1: cannot be read from here: <think>"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(grammar, reason):
    with pytest.raises(BadNotation) as bad:
        to_lark(grammar)
    assert str(bad.value) == reason


@given(st.text())
def test_a_literal_of_any_characters_accepts_itself(text):
    escaped = "".join(f"\\U{ord(c):08x}" for c in text)
    assert accepts(f'root ::= "{escaped}"', text)


@given(st.text('ab"[](){}|*+?.^-\\\nx0,:=# ', max_size=40))
def test_anything_is_translated_or_refused(text):
    with suppress(BadNotation):
        to_lark("root ::= " + text)
