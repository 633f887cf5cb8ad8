"""llama-server's endpoints, called one by one, and docs/llama-server.md, which is made from what they answer."""

import orjson
import pytest

from tests.contract.calls import CALLS, Call
from tests.contract.page import DOC, page
from tests.http.serving import serving


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
async def test_the_endpoint_answers_as_llama_server_does(call: Call):
    async with serving(**call.changes) as server:
        body = None if call.body is None else orjson.dumps(call.body)
        async with server.session.request(call.method, call.path, data=body) as response:
            status, answer = response.status, orjson.loads(await response.read() or b"{}")
    assert status == call.status, answer
    first = (answer or [{}])[0] if isinstance(answer, list) else answer
    assert call.members <= first.keys()
    if status >= 400:
        assert first["error"].get("code", status) == status and first["error"]["message"] and first["error"]["type"]


def test_the_page_is_up_to_date():
    assert DOC.read_text() == page(), "run: make contract"
