"""Samplers as clients ask for them, on a real tiny model: what is echoed, what comes out, and its chances."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from tests.http.serving import ROUTES, asking, said, serving
from tests.tiny import tiny_model

every_route = pytest.mark.parametrize("route", ROUTES)

ALL = {
    "temperature": 1.5,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.9,
    "top_n_sigma": 3.0,
    "min_keep": 2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repeat_last_n": 50,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 1,
    "dry_penalty_last_n": 100,
    "dry_sequence_breakers": ["\n", "end"],
    "mirostat": 0,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "adaptive_target": 0.3,
    "adaptive_decay": 0.8,
    "samplers": ["penalties", "temperature", "dry", "top_k", "xtc", "typ_p", "adaptive_p"],
}
WAYS = {
    "all at once": ALL,
    "letters": {**ALL, "samplers": "mpxyksdet"},
    "mirostat 1": {**ALL, "mirostat": 1},
    "mirostat 2": {**ALL, "mirostat": 2},
    "none": {"samplers": []},
}


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture
def serve(mlx_thread):
    model = mlx_thread.submit(tiny_model, "llama").result()
    return lambda **changes: serving(model=model, pool=mlx_thread, **changes)


@every_route
async def test_a_seed_gives_one_text_alone_streamed_and_beside_others_whatever_the_samplers(serve, route):
    asked = [asking(route, "hello", seed=3, max_tokens=12, ignore_eos=True, **way) for way in WAYS.values()]
    async with serve() as server:
        alone = [said((await server.post(route, body))[1]) for body in asked]
        beside = await asyncio.gather(*(server.stream(route, body) for body in asked))
    assert [stream.text() for stream in beside] == alone
    assert len(set(alone)) == len(WAYS)


async def test_the_settings_echo_what_was_asked(serve):
    async with serve() as server:
        _, body = await server.post("/completion", {"prompt": "x", "n_predict": 2, "seed": 1, **ALL})
    shown = body["generation_settings"]
    assert {name: shown[name] for name in ALL} == ALL


async def test_the_servers_own_samplers_are_shown_and_used(serve):
    async with serve(samplers="top_k;temperature", top_k=1, dry_sequence_breaker=("x",)) as server:
        _, props = await server.get("/props")
        texts = [said((await server.post("/completion", {"prompt": "hi", "n_predict": 8}))[1]) for _ in range(3)]
    params = props["default_generation_settings"]["params"]
    assert params["samplers"] == ["top_k", "temperature"] and params["top_k"] == 1
    assert "dry_sequence_breakers" not in params, "the reduced form"
    assert len(set(texts)) == 1


async def test_the_chances_of_the_draw_are_probabilities_and_none_is_zero(serve):
    ask = {"prompt": "hi", "n_predict": 3, "n_probs": 5, "post_sampling_probs": True, "top_k": 2, "seed": 1}
    async with serve() as server:
        _, body = await server.post("/completion", {**ask, "top_p": 1, "min_p": 0, "temperature": 2})
        _, sure = await server.post("/completion", {**ask, "temperature": 0})
        events = await server.stream("/completion", ask)
    for entry in body["completion_probabilities"]:
        assert "logprob" not in entry and len(entry["top_probs"]) == 2
        assert sum(top["prob"] for top in entry["top_probs"]) == pytest.approx(1.0, abs=1e-5)
        assert entry["prob"] in [top["prob"] for top in entry["top_probs"]]
    for entry in sure["completion_probabilities"]:
        assert entry["prob"] == 1.0 and [top["id"] for top in entry["top_probs"]] == [entry["id"]]
    streamed = [entry for event in events.data for entry in event.get("completion_probabilities", [])]
    assert len(streamed) == 3 and all(entry["prob"] > 0 for entry in streamed)


@every_route
async def test_chances_of_the_draw_come_in_every_dialect(serve, route):
    chat = {"logprobs": True, "top_logprobs": 2} if "chat" in route else {"logprobs": 2}
    async with serve() as server:
        status, body = await server.post(
            route, asking(route, "hi", max_tokens=2, ignore_eos=True, post_sampling_probs=True, **chat)
        )
    assert status == 200
    entries = body.get("completion_probabilities") or body["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2 and all(0 < entry["prob"] <= 1 and entry["top_probs"] for entry in entries)


@every_route
async def test_raw_chances_are_the_models_whatever_is_biased_or_penalised(serve, route):
    chat = {"logprobs": True, "top_logprobs": 1} if "chat" in route else {"logprobs": 1}
    plain = asking(route, "hi", max_tokens=1, temperature=0, **chat)
    async with serve() as server:
        bodies = [
            (await server.post(route, {**plain, **more}))[1] for more in ({}, {"logit_bias": [[65, 50.0]]})
        ]  # fmt: skip
    first, biased = [
        body.get("completion_probabilities") or body["choices"][0]["logprobs"]["content"] for body in bodies
    ]
    assert biased[0]["id"] == 65 != first[0]["id"]
    assert biased[0]["top_logprobs"][0]["id"] == first[0]["id"]
