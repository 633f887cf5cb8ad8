"""The command as an operator runs it: a process of its own, a tiny GGUF model, signals and exit statuses."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import pytest

from mlxcel.api.app import build_app, start_site
from mlxcel.api.prepare import MAX_COMPILING
from mlxcel.engine.health import MAX_FAILED_STEPS
from mlxcel.loading import Parts, choose_bounds
from mlxcel.server import _run
from tests.defaults import settings
from tests.engine.tiny_gguf import random_weights, write_gguf
from tests.http.serving import MODEL, wire

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=False))
    return str(path)


class Process:
    """A server that prints to a file; `port` once it listens."""

    def __init__(self, log, *flags):
        self.log = log
        command = [sys.executable, "-m", "mlxcel", "--host", "127.0.0.1", *flags]
        with log.open("w") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)

    def said(self, pattern):
        """The match of a pattern in the log, once there is one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log.read_text()):
                return found
            assert self.popen.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"{pattern} not in {self.log.read_text()}")

    @property
    def port(self):
        return int(self.said(r"listening on http://127\.0\.0\.1:(\d+)")[1])

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def text(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            return reply.read().decode()

    @contextmanager
    def connection(self):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def stream(self, **members):
        """An open stream of a completion, its first bytes there."""
        with self.connection() as connection:
            connection.request("POST", "/completion", json.dumps({"prompt": "hello", "stream": True, **members}))
            yield connection.getresponse()

    def ends(self, timeout=30):
        return self.popen.wait(timeout)


@contextmanager
def process(log, *flags):
    server = Process(log, *flags)
    try:
        yield server
    finally:
        server.popen.kill()
        server.popen.wait()


def test_it_listens_before_it_has_loaded_serves_and_stops_cleanly_on_sigterm(tmp_path, model):
    with process(tmp_path / "log", "-m", model, "--port", "0", "--shutdown-timeout", "20") as server:
        assert server.get("/health") == (503, {"error": {"code": 503, "message": "Loading model",
                                                          "type": "unavailable_error"}})  # fmt: skip
        server.said("ready")
        assert server.get("/health") == (200, {"status": "ok"})
        with server.stream(n_predict=200, ignore_eos=True) as running:
            assert running.status == 200
            server.popen.send_signal(signal.SIGTERM)
            events = [line for line in running.read().split(b"\n\n") if line]
        assert b'"stop":true' in events[-1] and b'"tokens_predicted":200' in events[-1]
        assert server.ends() == 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the connections it had are in TIME_WAIT
            probe.bind(("127.0.0.1", server.port))
        assert "Traceback" not in server.log.read_text()


def test_what_outlasts_the_shutdown_timeout_ends_with_an_error_event(tmp_path, model):
    flags = ("-m", model, "--port", "0", "--ctx-size", "1000000", "--shutdown-timeout", "0.2")
    with process(tmp_path / "log", *flags) as server:
        server.said("ready")
        with server.stream(ignore_eos=True) as running, server.connection() as idle:
            idle.request("GET", "/health")
            idle.getresponse().read()
            server.popen.send_signal(signal.SIGINT)
            events = [line for line in running.read().split(b"\n\n") if line]
            assert b'"error"' in events[-1] and b"shutting down" in events[-1]
            assert server.ends(15) == 0


def test_grammars_that_are_still_being_compiled_do_not_keep_the_process(tmp_path, model):
    """Each would be given up after ten seconds, and two are compiled at a time."""
    endless = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}
    body = json.dumps({"prompt": "hello", "json_schema": endless})
    with (
        process(tmp_path / "log", "-m", model, "--port", "0", "--shutdown-timeout", "1") as server,
        ExitStack() as open_,
    ):
        server.said("ready")
        compiling = [open_.enter_context(server.connection()) for _ in range(MAX_COMPILING)]
        for connection in compiling:
            connection.request("POST", "/completion", body)
        status = 0
        while status != 503:  # until all of them are in, the next one is too
            with server.connection() as connection:
                connection.timeout = 1
                connection.request("POST", "/completion", body)
                with suppress(TimeoutError):
                    status = connection.getresponse().status
        server.popen.send_signal(signal.SIGTERM)
        assert server.ends(8) == 0


def test_a_port_in_use_is_said_in_one_line_before_anything_is_loaded(tmp_path, model):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with process(tmp_path / "log", "-m", model, "--port", str(port)) as server:
            assert server.ends() == 1
            log = server.log.read_text()
    assert f"cannot listen on 127.0.0.1:{port}" in log.splitlines()[-1]
    assert "Traceback" not in log and "BLAS" not in log


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["-m", "/no/such/model.gguf"], 1, "no such file"),
        (["-m", "MODEL", "--ctx-size", "4", "--parallel", "4", "--no-kv-unified"], 2, "--ctx-size"),
        (["-m", "MODEL", "--chat-template", "{% if %}"], 2, "chat template"),
        (["-m", "MODEL", "--grammar", "root ::= x"], 2, "--grammar: failed to compile: line 1"),
        (["-m", "MODEL", "--json-schema", '{"type": "banana"}'], 2, "--json-schema: failed to compile: "),
        (["-m", "MODEL", "--ctx-size", "4", "--kv-unified-per-slot", "1"], 2, "--kv-unified-per-slot"),
        (["-m", "MODEL", "--sleep-idle-seconds", "0"], 2, "--sleep-idle-seconds"),
        (["-m", "MODEL", "--ssl-key-file", "FILE", "--ssl-cert-file", "FILE"], 1, "--ssl-cert-file: "),
        ([], 2, "-m PATH"),
    ],
    ids=[
        "no model",
        "no context",
        "bad template",
        "bad grammar",
        "bad schema",
        "no slot",
        "no wakefulness",
        "bad TLS",
        "none",
    ],
)
def test_what_cannot_be_served_ends_with_one_line_and_its_status(tmp_path, model, flags, status, message):
    (tmp_path / "file").write_text("not PEM")
    flags = [{"MODEL": model, "FILE": str(tmp_path / "file")}.get(flag, flag) for flag in flags]
    with process(tmp_path / "log", *flags, "--port", "0") as server:
        assert server.ends() == status
        log = server.log.read_text()
    assert message in log.splitlines()[-1]
    assert "Traceback" not in log


def test_a_second_signal_ends_the_process_at_once(tmp_path, model):
    flags = ("-m", model, "--port", "0", "--ctx-size", "1000000", "--shutdown-timeout", "600")
    with process(tmp_path / "log", *flags) as server:
        server.said("ready")
        with server.stream(ignore_eos=True):
            server.popen.send_signal(signal.SIGTERM)
            server.said("SIGTERM")
            server.popen.send_signal(signal.SIGTERM)
            assert server.ends(10) == 1


def test_an_idle_server_sleeps_through_its_probes_and_wakes_for_a_request(tmp_path, model):
    flags = ("-m", model, "--port", "0", "--sleep-idle-seconds", "1", "--metrics", "--log-jsonl")
    with process(tmp_path / "log", *flags) as server:
        server.said("ready")
        with server.stream(n_predict=5, temperature=0) as reply:
            awake = reply.read()
        server.said("asleep after 1 idle seconds")
        for path in ("/health", "/v1/models"):
            assert server.get(path)[0] == 200
        assert "llamacpp:n_decode_total" in server.text("/metrics")
        assert server.get("/props")[1]["is_sleeping"] is True
        assert "awake" not in server.log.read_text()
        with server.stream(n_predict=5, temperature=0) as reply:
            assert said(reply.read()) == said(awake)
        assert server.get("/props")[1]["is_sleeping"] is False
        server.popen.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {"time", "level", "logger", "message"} == set(lines[0])
        assert [line["level"] for line in lines if line["level"] not in ("info", "warning")] == []


def said(stream):
    return [json.loads(event[6:])["content"] for event in stream.split(b"\n\n") if event]


def test_two_servers_share_a_port_and_each_has_its_unix_socket(tmp_path, model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    sockets = [tmp_path / "a.sock", tmp_path / "b.sock"]
    flags = ("-m", model, "--port", port, "--reuse-port", "--no-self-test", "--no-warmup")
    with (
        process(tmp_path / "a", *flags, "--host", f"127.0.0.1,{sockets[0]}") as first,
        process(tmp_path / "b", *flags, "--host", f"127.0.0.1,{sockets[1]}") as second,
    ):
        for server, path in zip((first, second), sockets, strict=True):
            server.said("ready")
            assert server.port == int(port)
            assert over(path, b"GET /health HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')
        for server in (first, second):
            server.popen.send_signal(signal.SIGTERM)
            assert server.ends() == 0
    assert not any(path.exists() for path in sockets)


def over(path, request):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(4096), b""))


@pytest.mark.parametrize(
    ("changes", "n_ctx"),
    [
        ({}, 4096),
        ({"ctx_size": 1000}, 1000),
        ({"ctx_size": 1000, "parallel": 4}, 250),
        ({"ctx_size": 1000, "parallel": 4, "kv_unified": True}, 1000),
        ({"kv_unified_per_slot": 300, "parallel": 4}, 300),
        ({"kv_unified_per_slot": 300}, 300),
        ({"kv_unified_per_slot": 9999}, 4096),
        ({"kv_unified_per_slot": 300, "ctx_size": 1000, "parallel": 4, "kv_unified": True}, 300),
        ({"kv_unified_per_slot": 300, "ctx_size": 1000, "parallel": 4}, 250),
    ],
)
def test_how_much_of_the_context_a_slot_gets(changes, n_ctx):
    assert choose_bounds(settings(**changes), MODEL).n_ctx == n_ctx


async def test_an_engine_that_keeps_failing_ends_the_server_with_a_status_that_restarts_it():
    wired = wire()
    wired.engine.faults["decode"] = RuntimeError("broken")
    runner = await start_site(build_app(wired.services), wired.services.settings)
    serving = asyncio.create_task(
        _run(wired.services, runner, Parts(wired.engine, wired.scheduler), asyncio.Event(), wired.pool)
    )
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        for _ in range(MAX_FAILED_STEPS):
            async with session.post("/completion", json={"prompt": "x"}) as response:
                assert response.status == 500
    assert await serving == 1
    wired.pool.shutdown()
