"""What is not HTTP, byte by byte over a socket: a JSON error for whoever sent it, nothing of it in the log."""

import asyncio
import logging

import orjson
import pytest

from mlxcel import __version__
from tests.http.serving import asking, said, serving

POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "a line that is no request": b"HELLO\r\n\r\n",
    "a method that is none": b"G@T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a version that is none": b"GET /health HTTP/9.9x\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a URL that is none": b"GET http://[secret HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long first line": b"GET /" + b"secret" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"secret" * 5000 + b"\r\n\r\n",
    "too many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: secret\r\n" * 1000 + b"\r\n",
    "a header's name": b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization secret: 1\r\n\r\n",
    "a header's value": b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: secret\x00\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\nAuthorization: secret\r\n\r\n",
    "a length that is no number": POST + b"Content-Length: secret\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a length of chunks": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown encoding": POST + b"Transfer-Encoding: secret\r\n\r\n{}",
    "a chunk's length": CHUNKED + b"secret\r\n{}\r\n0\r\n\r\n",
    "a chunk's end": CHUNKED + b"2\r\n{}secret\r\n0\r\n\r\n",
}


async def answer(reader):
    """Status, headers and body of one answer; the connection must end after it."""
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    return int(status.split()[1]), dict(header.split(": ", 1) for header in headers), orjson.loads(body)


def assert_quiet(caplog):
    assert not [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]
    assert "secret" not in caplog.text


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_no_http_is_answered_in_json_and_leaves_no_traceback(sent, caplog):
    caplog.set_level(logging.DEBUG, "mlxcel")
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        status, headers, body = await answer(reader)
        writer.close()
        assert (status, body["error"]["code"], body["error"]["type"]) == (400, 400, "invalid_request_error")
        assert body["error"]["message"].startswith("request is not valid HTTP: ")
        assert "secret" not in body["error"]["message"] and "\n" not in body["error"]["message"]
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert headers["Server"] == f"mlxcel/{__version__}"
        assert (await server.get("/health"))[0] == 200
    assert_quiet(caplog)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("two lengths", "Duplicate Content-Length"),
        ("a long header", "its first line or a header is too long"),
        ("too many headers", "Too many headers received"),
        ("a chunk's length", "Invalid character in chunk size"),
    ],
)
async def test_the_answer_says_what_is_wrong(sent, words):
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(MALFORMED[sent])
        _, _, body = await answer(reader)
        writer.close()
        assert body["error"]["message"] == f"request is not valid HTTP: {words}"


async def test_a_body_that_goes_wrong_while_it_is_awaited_is_answered_at_once(caplog):
    async with serving(timeout=60) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n"), "the request is being handled"
        writer.write(b"2\r\n{}\r\nsecret\r\n")
        status, _, body = await answer(reader)
        writer.close()
        assert (status, body["error"]["message"]) == (400, "request body cannot be read")
    assert_quiet(caplog)


async def test_a_body_that_is_not_what_its_encoding_says_leaves_no_traceback(caplog):
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"Content-Encoding: gzip\r\nContent-Length: 6\r\n\r\nsecret")
        status, _, body = await answer(reader)
        writer.close()
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert_quiet(caplog)


async def test_what_is_malformed_behind_a_request_does_not_disturb_its_answer():
    async with serving() as server:
        server.engine.gate.clear()
        reader, writer = await server.open("/completion", asking("/completion", "<<hello>>"))
        await server.until(lambda: server.scheduler.num_active)
        writer.write(b"HELLO\r\n\r\n")
        await writer.drain()
        server.engine.gate.set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert said(orjson.loads(await reader.readexactly(length))) == "hello"
        assert (await answer(reader))[0] == 400
        writer.close()
