"""An environment file and a unit that were written for llama-server start this server unchanged."""

import json
import os
import re
import shlex
import urllib.request

import openai
import pytest

from tests.engine.tiny_gguf import random_weights, write_gguf
from tests.test_server import process

ENVIRONMENT_FILE = """\
# llama-server
LLAMA_ARG_MODEL={model}
LLAMA_ARG_CTX_SIZE=8192
LLAMA_ARG_N_PARALLEL=4
LLAMA_ARG_CACHE_REUSE=256
LLAMA_ARG_N_GPU_LAYERS=99
LLAMA_ARG_FLASH_ATTN=on
LLAMA_ARG_ENDPOINT_METRICS=1
LLAMA_ARG_PORT=0
LLAMA_API_KEY=sesame
"""
UNIT = """\
[Service]
EnvironmentFile=/etc/llama-server.env
ExecStart=/usr/local/bin/llama-server --host 127.0.0.1 -ngl 99 -t 8 --no-mmap --mlock -fa on --jinja -np 4 --slots
Restart=on-failure
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=False))
    return str(path)


def systemd_environment(text):
    """As systemd reads an EnvironmentFile: NAME=value lines, # for comments."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_environment_file_and_the_unit_of_llama_server(tmp_path, model, monkeypatch):
    for name, value in systemd_environment(ENVIRONMENT_FILE.format(model=model)).items():
        monkeypatch.setenv(name, value)
    flags = shlex.split(re.search("^ExecStart=(.*)$", UNIT, re.MULTILINE)[1])[1:]
    with process(tmp_path / "log", *flags) as server:
        server.said("ready")
        log = server.log.read_text()
        assert len(re.findall("accepted without effect here: ", log)) == 1
        assert "-ngl" in log and "4 slots of up to 2048 tokens" in log
        assert "sesame" not in log
        assert server.get("/v1/models")[0] == 401
        headers = {"Authorization": "Bearer sesame"}
        metrics = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
        with urllib.request.urlopen(metrics, timeout=10) as reply:
            assert b"llamacpp:requests_processing 0" in reply.read()
        for base in ("", "/v1"):
            sdk = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}{base}", api_key="sesame")
            reply = sdk.chat.completions.create(
                model="gpt-4o",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=4,
                extra_body={"cache_prompt": True, "id_slot": 0, "top_k": 10},
            )
            assert reply.usage.completion_tokens <= 4
            assert reply.timings["prompt_n"] + reply.timings["cache_n"] == reply.usage.prompt_tokens
            assert json.dumps(reply.model_dump())
    assert os.environ["LLAMA_API_KEY"] == "sesame"
