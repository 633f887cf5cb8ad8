"""/lora-adapters and the request field `lora`, on a server that has no adapters."""

import pytest

from tests.http.serving import ROUTES, asking, serving


async def test_there_are_no_adapters_and_all_of_them_can_be_switched_off():
    async with serving() as server:
        assert await server.get("/lora-adapters") == (200, [])
        assert await server.post("/lora-adapters", []) == (200, {"success": True})


@pytest.mark.parametrize(
    "body", [b"", b"{", {}, {"id": 0, "scale": 1}, [{"id": 0, "scale": 1.0}], [{"scale": 1}], [5], "x", None], ids=str
)
async def test_what_names_no_adapter_is_400(body):
    async with serving() as server:
        status, answer = await server.post("/lora-adapters", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_for_an_adapter_is_not_answered_without_it(route):
    async with serving() as server:
        for lora in ([{"id": 0, "scale": 0.5}], [{"id": "0"}], [{"id": 1, "scale": "x"}], {}):
            status, body = await server.post(route, asking(route, "<<x>>", lora=lora))
            assert (status, body["error"]["param"]) == (400, "lora")
        assert (await server.post(route, asking(route, "<<x>>", lora=[])))[0] == 200
