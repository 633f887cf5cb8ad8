"""/models and /props: what the server says of itself, member by member as llama-server does."""

import pytest

from tests.http.serving import serving
from tests.tiny import CHATML

MODEL = {"id", "aliases", "tags", "object", "created", "owned_by", "architecture", "meta"}
META = {"vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype"}
OLLAMA = {
    "name", "model", "modified_at", "size", "digest", "type", "description", "tags", "capabilities", "parameters",
    "details",
}  # fmt: skip
DETAILS = {"parent_model", "format", "family", "families", "parameter_size", "quantization_level"}
PROPS = {
    "default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path", "modalities",
    "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "ui_settings", "chat_template",
    "chat_template_caps", "bos_token", "eos_token", "build_info", "is_sleeping", "cors_proxy_enabled",
}  # fmt: skip


# --- /models


async def test_models_in_the_shapes_of_openai_and_ollama():
    async with serving(bounds={"n_ctx": 512}) as server:
        status, body = await server.get("/v1/models")
        assert status == 200 and body == (await server.get("/models"))[1] | {"data": body["data"]}
    assert body.keys() == {"object", "data", "models"} and body["object"] == "list"
    [model], [ollama] = body["data"], body["models"]
    assert model.keys() == MODEL and model["meta"].keys() == META
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "llamacpp")
    assert model["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    meta = {key: model["meta"][key] for key in ("vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd")}
    assert meta == {"vocab_type": 2, "n_vocab": 320, "n_ctx": 512, "n_ctx_train": 4096, "n_embd": 64}
    assert ollama.keys() == OLLAMA and ollama["details"].keys() == DETAILS
    assert (ollama["name"], ollama["model"], ollama["capabilities"]) == ("tiny", "tiny", ["completion"])
    assert (ollama["details"]["family"], ollama["details"]["families"]) == ("tiny", ["tiny"])


async def test_aliases_and_tags_are_told_once_each_and_in_order():
    async with serving(alias=("b", "a", "b"), tags=("small", "chat")) as server:
        _, body = await server.get("/models")
    assert (body["data"][0]["aliases"], body["data"][0]["tags"]) == (["a", "b"], ["chat", "small"])


# --- /props


async def test_props_tell_the_model_the_slots_and_the_defaults():
    async with serving(temperature=0.3, n_predict=7, ui=False, bounds={"n_ctx": 512}) as server:
        status, body = await server.get("/props")
        assert status == 200 and body.keys() == PROPS
        defaults = body["default_generation_settings"]
        assert defaults.keys() == {"params", "n_ctx"} and defaults["n_ctx"] == 512
        told = {key: defaults["params"][key] for key in ("temperature", "n_predict", "max_tokens", "seed", "stream")}
        assert told == {"temperature": 0.3, "n_predict": 7, "max_tokens": 7, "seed": 0xFFFFFFFF, "stream": False}
        assert (body["total_slots"], body["model_alias"], body["model_ftype"]) == (4, "tiny", "float32")
        assert body["modalities"] == {"vision": False, "video": False, "audio": False}
        assert (body["ui"], body["endpoint_slots"], body["endpoint_props"]) == (False, True, False)
        assert body["chat_template"] == server.services.live.template.source
        assert body["eos_token"] == "<|im_end|>"
        assert body == (await server.get("/props"))[1]


async def test_props_of_a_server_whose_requests_need_a_salt_and_whose_model_has_no_template():
    async with serving(template=None, require_cache_salt=True) as server:
        status, body = await server.get("/props")
    assert (status, body["chat_template"], body["chat_template_caps"]) == (200, "", {})


async def test_props_say_what_the_template_can_do():
    async with serving(template=CHATML) as server:
        _, body = await server.get("/props")
    caps = body["chat_template_caps"]
    assert caps["supports_system_role"] and caps["supports_string_content"] and not caps["supports_tools"]


async def test_props_are_changed_by_nobody_unless_allowed():
    async with serving() as server:
        status, body = await server.post("/props", {})
        assert (status, body["error"]["type"]) == (501, "not_supported_error")
        assert "--props" in body["error"]["message"]
    async with serving(props=True) as server:
        assert (await server.get("/props"))[1]["endpoint_props"]
        for body in ({}, {"temperature": 5}, b""):
            assert await server.post("/props", body) == (200, {"success": True})
        for bad in (b"{", b"[]"):
            assert (await server.post("/props", bad))[0] == 400


@pytest.mark.parametrize("path", ["/models", "/v1/models", "/props", "/slots"])
async def test_what_the_server_says_of_itself_needs_the_key(path):
    async with serving(api_key=("sesame",)) as server:
        assert (await server.get(path))[0] == 401
