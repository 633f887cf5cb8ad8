"""Flags of llama-server whose effect shows in what a request is answered."""

import pytest

from tests.http.serving import ROUTES, asking, said, serving


@pytest.mark.parametrize("route", ROUTES)
async def test_special_tokens_are_written_out_when_asked_for(route):
    for special, text in ((False, "ab"), (True, "a<|im_start|>b<|im_end|>")):
        async with serving(special=special) as server:
            _, body = await server.post(route, asking(route, "<<a<|im_start|>b>>"))
            events = await server.stream(route, asking(route, "<<a<|im_start|>b>>"))
        assert said(body) == events.text() == text
        assert events.reasons[-1] in ("stop", "eos")


async def test_a_stop_string_may_be_a_special_token_that_is_written_out():
    async with serving(special=True) as server:
        _, body = await server.post("/completion", asking("/completion", "<<a<|im_start|>b>>", stop=["<|im_start|>"]))
    assert (body["content"], body["stop_type"], body["stopping_word"]) == ("a", "word", "<|im_start|>")


async def test_settings_of_a_page_are_told_in_props():
    for config in ({}, {"title": "ours", "deep": {"a": [1]}}):
        async with serving(ui_config=config) as server:
            assert (await server.get("/props"))[1]["ui_settings"] == config
