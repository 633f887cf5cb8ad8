"""Flags of llama-server whose effect shows in what a request is answered."""

import pytest

from mlxcel.api.promptlog import make_folder
from mlxcel.errors import ConfigError
from tests.defaults import settings
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


async def test_prompts_are_written_to_files_of_their_own(tmp_path):
    folder = tmp_path / "deep" / "prompts"
    make_folder(settings(log_prompts_dir=str(folder)))
    async with serving(log_prompts_dir=str(folder)) as server:
        await server.post("/completion", asking("/completion", ["<<one>>", "<<two>> é"]))
        await server.stream(ROUTES[0], asking(ROUTES[0], "<<three>>"))
        await server.until(lambda: not server.services.background)
    files = sorted(folder.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    texts = [path.read_text() for path in files]
    assert texts[:2] == ["<<one>>", "<<two>> é"] and "<|im_start|>user\n<<three>>" in texts[2] and len(texts) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


async def test_a_folder_for_prompts_that_is_gone_or_cannot_be_made_harms_no_request(tmp_path, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^--log-prompts-dir: cannot make "):
        make_folder(settings(log_prompts_dir=str(tmp_path / "file" / "sub")))
    async with serving(log_prompts_dir=str(tmp_path / "gone")) as server:
        status, _ = await server.post("/completion", asking("/completion", "<<one>>"))
        await server.until(lambda: not server.services.background)
    assert status == 200 and "--log-prompts-dir: cannot write" in caplog.text
