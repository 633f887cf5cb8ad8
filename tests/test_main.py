"""What the command prints instead of serving: each asks for nothing else and ends with status 0."""

import shlex
import subprocess

import pytest

from mlxcel.__main__ import main
from mlxcel.usage import help_text, version_text


def printed(capsys, *words):
    assert main(["--port", "wrong", *words]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_the_help_and_the_version(capsys):
    assert printed(capsys, "--help") == help_text()
    assert printed(capsys, "--version") == version_text()


@pytest.mark.parametrize("flag", ["-cl", "--cache-list"])
def test_the_downloaded_models(capsys, tmp_path, monkeypatch, flag):
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "none"))
    assert printed(capsys, flag) == "number of models in cache: 0"


def test_the_devices_with_one_processor_at_least(capsys):
    first, *devices = printed(capsys, "--list-devices").splitlines()
    assert first == "Available devices:" and devices[-1].startswith("  CPU0: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ctx-si"], {"--ctx-size"}),
        (["--port", "1", "--no-cont"], {"--no-cont-batching", "--no-context-shift"}),
        (["-m", "mod"], {"model.gguf", "models"}),
        (["--chat-template-file", "n"], {"notes.txt"}),
    ],
)
def test_the_completion_script_completes_options_and_after_some_of_them_files(capsys, tmp_path, words, expected):
    for name in ("model.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    asking = f"COMP_WORDS=(mlxcel-server {shlex.join(words)}); COMP_CWORD={len(words)}; _mlxcel_server"
    script = f"{printed(capsys, '--completion-bash')}\n{asking}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    out = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (set(out.stdout.split()), out.stderr) == (expected, "")
