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
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import pytest

from mlxcel.api.app import build_app, start_site
from mlxcel.engine.scheduler import MAX_FAILED_STEPS
from mlxcel.server import Parts, _run
from tests.engine.tiny_gguf import random_weights, write_gguf
from tests.http.serving import wire

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
        ([], 2, "-m PATH"),
    ],
    ids=["no model", "no context", "bad template", "bad grammar", "bad schema", "nothing to serve"],
)
def test_what_cannot_be_served_ends_with_one_line_and_its_status(tmp_path, model, flags, status, message):
    flags = [model if flag == "MODEL" else flag for flag in flags]
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
