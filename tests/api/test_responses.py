"""The shapes of answers, and that a stream adds up to the body."""

from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.api.native import Native, effective_settings
from mlxcel.api.options import Options
from mlxcel.api.requests import parse_native
from mlxcel.api.responses import DONE, MIN_LOGPROB, Chat, Choice, Completion, Reply, Timings, finite, usage
from mlxcel.engine.sequence import Delta, Finished, Generation, Progress, Sampling, TokenLogprob
from tests.defaults import settings

END = Finished("eos", "", prompt_tokens=10, completion_tokens=4, cached_tokens=6, truncated=False, prompt_ms=8.0,
               predicted_ms=20.0)  # fmt: skip
LIVE = Timings(6, 4, 8.0, 1, 5.0)


def options(**changes) -> Options:
    return replace(parse_native(b'{"prompt": "x"}', settings(seed=5)).options, **changes)


def reply(**changes) -> Reply:
    return Reply(options(**changes), "tiny", 1234, lambda token: bytes([token]), id="x" * 32)


def chat(num_choices=1, **changes):
    return Chat(reply(**changes))


def completion(num_choices=1, **changes):
    return Completion(reply(**changes), num_choices)


def native(num_choices=1, **changes):
    generation = Generation(array("i", [1, 2]), Sampling(seed=5))
    return Native(reply(**changes), [generation] * num_choices, ["<s>x"] * num_choices)


def said(text: str, *logprobs: TokenLogprob) -> Delta:
    return Delta(text, tuple(text.encode()), logprobs)


def play(shape, events, timings=None, num_choices=1):
    """What the shape streams of (index, event) pairs, and the body of the same choices."""
    choices = [Choice(i, prompt=0, num_prompt=10) for i in range(num_choices)]
    chunks = []
    for index, event in events:
        choices[index].add(event)
        chunks += shape.chunks(choices[index], event, timings)
    return chunks, shape.tail(choices), shape.body(choices)


def alone(*events):
    return [(0, event) for event in events]


SHAPES = {"chat": chat, "completion": completion, "native": native}
every_shape = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)


def text_of(chunk, whole=False):
    if "content" in chunk:
        return chunk["content"]
    choice = chunk["choices"][0]
    part = choice.get("message" if whole else "delta")
    return (part.get("content") or "") if part is not None else choice["text"]


# --- the stream is the body in pieces


@every_shape
@given(pieces=st.lists(st.text(max_size=4), max_size=6), stop=st.sampled_from(["eos", "limit", "word"]))
def test_the_chunks_concatenate_to_the_body(make, pieces, stop):
    end = replace(END, stop_type=stop, stopping_word="w" if stop == "word" else "")
    chunks, _, body = play(make(), alone(*map(said, pieces), end))
    assert "".join(map(text_of, chunks)) == text_of(body, whole=True) == "".join(pieces)
    orjson.dumps([chunks, body])


@pytest.mark.parametrize("make", [chat, completion])
def test_all_chunks_of_a_reply_name_the_same_reply(make):
    chunks, _, body = play(make(), alone(said("a"), said("b"), END))
    same = {(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in [*chunks, body]}
    assert len(same) == 1
    assert all(c["object"].endswith("chunk") == (make is chat) for c in chunks)


@every_shape
@pytest.mark.parametrize("events", [(END,), (said(""), END)], ids=["nothing", "special tokens only"])
def test_an_empty_answer_is_still_whole(make, events):
    chunks, _, body = play(make(), alone(*events))
    assert text_of(body, whole=True) == ""
    ends = [c for c in chunks if c.get("stop") or (c.get("choices") and c["choices"][0]["finish_reason"])]
    assert ends == chunks[-1:]


# --- chat


def test_a_chat_stream_opens_with_the_role_says_the_text_and_ends_with_the_reason():
    chunks, tail, _ = play(chat(), alone(Progress(9, 10, 6), said("a"), said("b"), END))
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": None},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert [("usage" in c, "timings" in c) for c in chunks] == [(False, False)] * 3 + [(False, True)]
    assert tail == DONE


def test_with_include_usage_one_more_chunk_without_choices_carries_usage_and_timings():
    for make in (chat, completion):
        chunks, tail, body = play(make(include_usage=True), alone(said("a"), END))
        last, done, rest = tail.removeprefix(b"data: ").split(b"\n\n", 2)
        assert (done, rest) == (b"data: [DONE]", b"")
        usage_chunk = orjson.loads(last)
        assert usage_chunk["choices"] == []
        assert usage_chunk["usage"] == body["usage"]
        assert usage_chunk["timings"] == body["timings"]
        assert not any("usage" in c or "timings" in c for c in chunks)


def test_the_body_of_a_chat():
    _, _, body = play(chat(), alone(said("hi"), replace(END, stop_type="limit")))
    assert body["object"] == "chat.completion" and body["id"] == "chatcmpl-" + "x" * 32
    message = {"role": "assistant", "content": "hi"}
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


# --- completions


def test_the_last_chunk_of_a_completion_carries_usage_without_being_asked():
    chunks, tail, body = play(completion(), alone(said("a"), END))
    assert [c["choices"][0]["text"] for c in chunks] == ["a", ""]
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in chunks[0] and chunks[1]["usage"] == body["usage"]
    assert tail == DONE
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")


def test_of_several_choices_the_last_to_finish_carries_the_usage_of_all():
    chunks, _, body = play(completion(2), [(1, said("b")), (1, END), (0, said("a")), (0, END)], num_choices=2)
    assert [("usage" in c, c["choices"][0]["index"]) for c in chunks] == [(False, 1), (False, 1), (False, 0), (True, 0)]
    assert chunks[-1]["usage"] == body["usage"]
    assert [c["text"] for c in body["choices"]] == ["a", "b"]


# --- native


def test_the_native_final_object():
    _, tail, body = play(native(), alone(said("a\n"), replace(END, stop_type="word", stopping_word="b")))
    assert tail == b""
    told = {k: body[k] for k in ("stop", "stop_type", "stopping_word", "has_new_line", "truncated", "model", "prompt")}
    assert told == {
        "stop": True,
        "stop_type": "word",
        "stopping_word": "b",
        "has_new_line": True,
        "truncated": False,
        "model": "tiny",
        "prompt": "<s>x",
    }
    assert (body["tokens_evaluated"], body["tokens_predicted"], body["tokens_cached"]) == (10, 4, 13)
    assert (body["timings"]["cache_n"], body["timings"]["prompt_n"]) == (6, 4)
    assert body["tokens"] == [] and "completion_probabilities" not in body
    assert body["generation_settings"]["seed"] == 5 and body["generation_settings"]["n_predict"] == -1


def test_the_native_stream_ends_with_the_final_object_without_what_was_streamed():
    chunks, _, body = play(native(return_tokens=True), alone(said("ab"), said("c"), END))
    assert [(c["content"], c["tokens"], c["stop"]) for c in chunks] == [
        ("ab", [97, 98], False),
        ("c", [99], False),
        ("", [], True),
    ]
    assert [c["tokens_predicted"] for c in chunks] == [2, 3, 4]
    assert body["tokens"] == [97, 98, 99]
    assert chunks[-1] | {"content": "abc", "tokens": body["tokens"]} == body


def test_several_native_results_are_an_array():
    _, _, body = play(native(2), [(0, said("a")), (1, said("b")), (0, END), (1, END)], num_choices=2)
    assert [(r["index"], r["content"]) for r in body] == [(0, "a"), (1, "b")]


def test_a_ban_in_the_settings_is_null_because_json_has_no_infinity():
    sampling = Sampling(logit_bias=((5, 1.5), (6, float("-inf"))))
    shown = effective_settings(Generation(array("i", [1]), sampling, max_tokens=7), options())
    assert shown["logit_bias"] == [{"token": 5, "bias": 1.5}, {"token": 6, "bias": None}]
    assert shown["max_tokens"] == shown["n_predict"] == 7


# --- log-probabilities

A = TokenLogprob(97, -0.5, ((97, -0.5), (98, float("-inf"))))
B = TokenLogprob(0xC3, float("nan"), ())


@pytest.mark.parametrize(
    ("logprob", "shown"), [(-0.5, -0.5), (float("-inf"), MIN_LOGPROB), (float("nan"), MIN_LOGPROB), (-1e9, MIN_LOGPROB)]
)
def test_what_json_cannot_say_is_floored(logprob, shown):
    assert finite(logprob) == shown


def test_chat_logprobs_have_a_token_its_bytes_and_the_alternatives():
    chunks, _, body = play(chat(top_logprobs=2), alone(said("a", A), Delta("", (0xC3,), (B,)), END))
    entries = body["choices"][0]["logprobs"]["content"]
    first = {"id": 97, "token": "a", "bytes": [97], "logprob": -0.5}
    other = {"id": 98, "token": "b", "bytes": [98], "logprob": MIN_LOGPROB}
    assert entries[0] == first | {"top_logprobs": [first, other]}
    assert entries[1] == {"id": 0xC3, "token": "\ufffd", "bytes": [0xC3], "logprob": MIN_LOGPROB, "top_logprobs": []}
    streamed = [e for c in chunks for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]]
    assert streamed == entries, "none is lost where a token adds no text"


def test_without_being_asked_there_are_no_logprobs():
    assert "logprobs" not in play(chat(), alone(said("a"), END))[2]["choices"][0]
    assert play(completion(), alone(said("a"), END))[2]["choices"][0]["logprobs"] is None


def test_completion_logprobs_can_be_read_by_clients_of_both_kinds():
    C = TokenLogprob(99, -1.0, ((99, -1.0),))
    chunks, _, body = play(completion(top_logprobs=1), alone(said("a", A), said("c", C), END))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [e["token"] for e in logprobs["content"]] == ["a", "c"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "b": MIN_LOGPROB}, {"c": -1.0}]
    assert logprobs["text_offset"] == [0, 1]
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [1]


def test_native_probabilities_stand_in_partial_chunks_and_in_the_body():
    chunks, _, body = play(native(top_logprobs=2), alone(said("a", A), END))
    assert chunks[0]["completion_probabilities"] == body["completion_probabilities"]
    assert "completion_probabilities" not in chunks[-1]


# --- timings, progress, usage


@every_shape
def test_timings_per_token_and_progress_are_said_where_asked(make):
    asked, _, _ = play(make(), alone(Progress(9, 10, 6), said("a"), END), timings=LIVE)
    progress = next(c["prompt_progress"] for c in asked if "prompt_progress" in c)
    assert progress == {"total": 10, "cache": 6, "processed": 9, "time_ms": 8.0}
    assert any(c.get("timings") == LIVE.json() for c in asked)
    silent, _, _ = play(make(), alone(Progress(9, 10, 6), said("a"), END))
    assert not any("prompt_progress" in c for c in silent) and not any("timings" in c for c in silent[:-1])


def test_timings_add_up_and_divide_by_nothing():
    assert Timings.of(END).json() == {
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 8.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 4,
        "predicted_ms": 20.0,
        "predicted_per_token_ms": 5.0,
        "predicted_per_second": 200.0,
    }
    nothing = Timings(0, 0, 0.0, 0, 0.0).json()
    assert set(nothing.values()) == {0}


def test_usage_counts_a_shared_prompt_once_as_its_first_choice_met_it():
    second = replace(END, cached_tokens=9, completion_tokens=1)
    other = replace(END, prompt_tokens=5, cached_tokens=0)
    choices = [Choice(0, 0, 10, finished=END), Choice(1, 0, 10, finished=second), Choice(2, 1, 5, finished=other)]
    assert usage(choices) == {
        "prompt_tokens": 15,
        "completion_tokens": 9,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
