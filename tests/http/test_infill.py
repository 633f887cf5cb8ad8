"""POST /infill on a vocabulary with the tokens for it, and on one without."""

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from mlxcel.engine.tokenizer import Tokenizer
from tests.http.serving import MODEL, serving
from tests.tiny import EOS, VOCAB, byte_backend

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
REPOSITORY = ("<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
GAP = {"input_prefix": "def f(): <<x>>", "input_suffix": "return 1"}


def model(*names):
    backend = byte_backend()
    backend.add_special_tokens(list(names))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    return replace(MODEL, tokenizer=Tokenizer(fast, eos_ids=[EOS], vocab_size=VOCAB, chat_template=None))


def infilling(*more, **changes):
    return serving(model=model(*NAMES, *more), template=None, **changes)


async def shown_prompt(server, **members):
    status, body = await server.post("/infill", GAP | members)
    assert status == 200, body
    return body["prompt"]


async def test_a_gap_is_filled_in_the_native_form_streamed_and_not():
    async with infilling() as server:
        status, body = await server.post("/infill", GAP)
        events = await server.stream("/infill", GAP)
        native = await server.post("/completion", {"prompt": "<<x>>"})
    assert status == 200
    assert body["prompt"] == "<|fim_prefix|>def f(): <<x>><|fim_suffix|>return 1<|fim_middle|>"
    assert body["content"] == events.text() == "x"
    assert body.keys() == native[1].keys() and not events.done


async def test_suffix_first_where_the_model_wants_it():
    async with infilling(spm_infill=True) as server:
        assert await shown_prompt(server) == "<|fim_suffix|>return 1<|fim_prefix|>def f(): <<x>><|fim_middle|>"


async def test_what_the_gap_begins_with_stands_before_it():
    async with infilling() as server:
        assert (await shown_prompt(server, prompt="  y = ")).startswith("<|fim_prefix|>def f(): <<x>>  y = <|fim_suf")


async def test_other_files_stand_before_all_in_the_form_the_model_knows():
    extra = [{"text": "a = 1", "filename": "a.py"}, {"text": "b"}]
    async with infilling(*REPOSITORY) as server:
        assert (await shown_prompt(server, input_extra=extra)).startswith(
            "<|repo_name|>myproject\n<|file_sep|>a.py\na = 1<|file_sep|>tmp\nb<|file_sep|>filename\n<|fim_prefix|>def"
        )
    async with infilling() as server:
        prompt = await shown_prompt(server, input_extra=extra)
        assert prompt.index("a.py") < prompt.index("a = 1") < prompt.index("<|fim_prefix|>")
        assert (await shown_prompt(server, input_extra=[])).startswith("<|fim_prefix|>")


async def test_the_fields_of_a_completion_count():
    async with infilling() as server:
        gap = GAP | {"input_prefix": "<<hello>>", "n_predict": 2, "n": 2, "response_fields": ["content", "index"]}
        _, body = await server.post("/infill", gap)
    assert body == [{"content": "he", "index": 0}, {"content": "he", "index": 1}]


async def test_a_special_token_written_in_a_file_is_text():
    async with infilling() as server:
        _, plain = await server.post("/infill", GAP | {"input_suffix": "x"})
        _, body = await server.post("/infill", GAP | {"input_suffix": "<|fim_middle|>"})
        assert body["tokens_evaluated"] == plain["tokens_evaluated"] - 1 + len("<|fim_middle|>")


async def test_the_gap_is_full_when_the_model_says_so():
    tokenizer = model(*NAMES, *REPOSITORY).tokenizer
    assert tokenizer.eos_ids == {EOS, *(tokenizer.encode(name, add_special=False)[0] for name in REPOSITORY)}


async def test_a_file_larger_than_the_context_is_cut_around_the_gap():
    gap = {"input_prefix": "p" * 5000 + "<<x>>", "input_suffix": "s" * 5000, "n_predict": 4}
    for settings, n_ctx in (({"batch_size": 400}, 4096), ({}, 400)):
        async with infilling(*REPOSITORY, bounds={"n_ctx": n_ctx}, **settings) as server:
            extra = [{"text": "e" * 9000}]
            status, body = await server.post("/infill", gap | {"input_extra": extra})
            assert status == 200, body
            around = body["prompt"][body["prompt"].index("<|fim_prefix|>") :]
            most = min(400, n_ctx * 3 // 4)
            assert most * 5 // 8 <= around.count("p") + around.count("s") - 4 <= most and body["content"] == "x"
            assert body["tokens_evaluated"] < n_ctx


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_suffix": {}}, "input_suffix"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": ["x"]}, "input_extra[0]"),
        ({"input_extra": [{"text": "x"}, {"filename": "x"}]}, "input_extra[1].text"),
        ({"input_extra": [{"text": "x", "filename": 5}]}, "input_extra[0].filename"),
        ({"prompt": 5}, "prompt"),
        ({"n_indent": -1}, "n_indent"),
        ({"input_prefix": [5000]}, "prompt"),
    ],
    ids=str,
)
async def test_a_wrong_field_is_400_by_its_name(members, param):
    async with infilling() as server:
        status, body = await server.post("/infill", GAP | members)
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)


async def test_a_bad_body_is_400():
    async with infilling() as server:
        for body in (b"", b"{", b"[]", b"null"):
            assert (await server.post("/infill", body))[0] == 400


async def test_empty_texts_and_token_ids_are_texts_too():
    async with infilling() as server:
        assert await shown_prompt(server, input_prefix="", input_suffix=[], n_predict=1) == "".join(NAMES)
        assert "def f" in await shown_prompt(server, input_suffix=["a", 5])


async def test_a_model_without_the_tokens_says_501():
    async with serving() as server:
        for body in (GAP, b"{"):
            status, answer = await server.post("/infill", body)
            assert (status, answer["error"]["type"]) == (501, "not_supported_error")
