"""The server as the official client sees it."""

import openai
import pytest

from tests.http.serving import serving

MESSAGES = [{"role": "user", "content": "<<héllo>>"}]


def client(server, key="none"):
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


async def test_a_chat_in_one_piece():
    async with serving() as server, client(server) as sdk:
        reply = await sdk.chat.completions.create(model="any", messages=MESSAGES)
    assert reply.choices[0].message.content == "héllo"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 7


async def test_a_streamed_chat_with_usage():
    async with serving() as server, client(server) as sdk:
        stream = await sdk.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "héllo"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert len({c.id for c in chunks}) == 1


async def test_extra_body_log_probabilities_and_several_choices():
    async with serving(require_cache_salt=True) as server, client(server) as sdk:
        reply = await sdk.chat.completions.create(
            model="any", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, extra_body={"cache_salt": "tenant"}
        )
    assert [choice.message.content for choice in reply.choices] == ["héllo"] * 2
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 3


async def test_legacy_completions_both_ways():
    async with serving() as server, client(server) as sdk:
        reply = await sdk.completions.create(model="any", prompt="<<one>>", logprobs=2)
        assert reply.choices[0].text == "one"
        assert reply.choices[0].logprobs.tokens == ["o", "n", "e"]
        stream = await sdk.completions.create(model="any", prompt="<<two>>", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "two"


@pytest.mark.parametrize(
    ("members", "error", "param"),
    [
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"response_format": {"type": "banana"}}, openai.BadRequestError, "response_format"),
    ],
)
async def test_refusals_arrive_as_the_sdks_exceptions_and_name_the_field(members, error, param):
    async with serving() as server, client(server) as sdk:
        with pytest.raises(error) as refused:
            await sdk.chat.completions.create(model="any", messages=MESSAGES, **members)
    assert refused.value.param == param


async def test_a_wrong_key_is_an_authentication_error():
    async with serving(api_key=("sesame",)) as server:
        async with client(server, "wrong") as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
        async with client(server, "sesame") as sdk:
            assert [model.id async for model in sdk.models.list()] == ["tiny"]


async def test_an_error_in_mid_stream_is_an_exception_and_not_a_short_answer():
    async with serving() as server, client(server) as sdk:
        stream = await sdk.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "babble"}], stream=True
        )
        with pytest.raises(openai.APIError):
            async for _ in stream:
                if server.scheduler.totals.completion_tokens > 5:
                    server.engine.faults["decode"] = RuntimeError("x")


async def test_a_client_that_closes_its_stream_frees_the_slot():
    async with serving() as server, client(server) as sdk:
        stream = await sdk.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "babble"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
