"""Slots: what they show, and their state saved, restored and erased, on real tiny models."""

import asyncio
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from tests.http.serving import asking, serving
from tests.models.chats import Chat
from tests.tiny import tiny_model

LONG = "This is a long enough beginning for it to be worth storing, and it is longer than the window. "
KINDS = ("llama", "gemma3_text", "mamba2", "qwen3_next")


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


def real(family, thread, folder, **changes):
    model = thread.submit(tiny_model, family).result()
    return serving(model=model, pool=thread, slot_save_path=str(folder), disable_cache_warmup=True, **changes)


async def act(server, id, action, **body):
    return await server.post(f"/slots/{id}?action={action}", body)


# --- what they show


async def test_an_idle_server_shows_its_slots():
    async with serving() as server:
        status, slots = await server.get("/slots")
    assert status == 200
    assert slots == [{"id": i, "n_ctx": 100_000, "speculative": False, "is_processing": False} for i in range(4)]


async def test_a_running_request_is_shown_in_its_slot_and_afterwards_as_its_last():
    async with serving() as server:
        sequence = asyncio.create_task(server.post("/completion", asking("/completion", LONG, id_slot=2)))
        await server.until(lambda: server.scheduler.slots[2].sequence is not None)
        server.scheduler.cancel(server.scheduler.slots[2].sequence)
        _, slots = await server.get("/slots")
        assert slots[2]["n_prompt_tokens"] == len(LONG)
        assert set(slots[2]) == {
            "id", "n_ctx", "speculative", "is_processing", "id_task", "n_prompt_tokens", "n_prompt_tokens_processed",
            "n_prompt_tokens_cache", "params", "next_token",
        }  # fmt: skip
        assert set(slots[2]["next_token"][0]) == {"has_next_token", "has_new_line", "n_remain", "n_decoded"}
        sequence.cancel()


async def test_prompts_and_texts_are_shown_to_those_who_debug_and_to_nobody_else():
    for is_debugging in (True, False):
        async with serving(slots_debug=is_debugging) as server:
            await server.post("/completion", asking("/completion", "<<ok\n>>", id_slot=0))
            _, slots = await server.get("/slots")
        shown = {key: slots[0][key] for key in ("prompt", "generated") if key in slots[0]}
        assert shown == ({"prompt": "<<ok\n>>", "generated": "ok\n<|im_end|>"} if is_debugging else {})
        assert slots[0]["next_token"][0]["has_new_line"]


async def test_a_request_says_which_slot_it_ran_in_and_ids_wrap():
    async with serving() as server:
        for wanted, got in ((0, 0), (3, 3), (7, 3), (4, 0)):
            _, body = await server.post("/completion", asking("/completion", "<<ok>>", id_slot=wanted))
            assert body["id_slot"] == got
        for odd in (-1, "x", 1.5, None, {}):
            status, body = await server.post("/completion", asking("/completion", "<<ok>>", id_slot=odd))
            assert status == 200 and body["id_slot"] in range(4)


async def test_requests_for_one_slot_run_one_after_the_other_while_others_pass():
    async with serving() as server:
        server.engine.gate.clear()
        asked = [asking("/completion", "<<ok>>", id_slot=1) for _ in range(2)] + [asking("/completion", "<<ok>>")]
        answers = [asyncio.create_task(server.post("/completion", body)) for body in asked]
        await server.until(lambda: server.scheduler.totals.submitted == 3)
        server.engine.gate.set()
        bodies = [body for _, body in await asyncio.gather(*answers)]
        together = [{start.id for start in plan.start} for plan in server.engine.plans if len(plan.start) > 1]
    assert [b["id_slot"] for b in bodies[:2]] == [1, 1] and bodies[2]["id_slot"] != 1
    assert not any({1, 2} <= ids for ids in together)


async def test_a_server_without_a_free_slot_says_so_when_asked():
    async with serving() as server:
        assert (await server.get("/slots?fail_on_no_slot=1"))[0] == 200
        busy = [asyncio.create_task(server.post("/completion", asking("/completion", "go on"))) for _ in range(4)]
        await server.until(lambda: server.scheduler.num_active == 4)
        status, body = await server.get("/slots?fail_on_no_slot=1")
        assert (status, body["error"]["message"]) == (503, "no slot available")
        for task in busy:
            task.cancel()


async def test_what_is_switched_off_says_which_flag():
    async with serving(slots=False) as server:
        for status, body in (await server.get("/slots"), await act(server, 0, "erase")):
            assert status == 501 and body["error"]["type"] == "not_supported_error"


# --- save, restore, erase


@pytest.mark.parametrize("family", KINDS)
async def test_a_restored_slot_is_reused_by_the_next_request(family, mlx_thread, tmp_path):
    async with real(family, mlx_thread, tmp_path) as server:
        _, first = await server.post("/completion", asking("/completion", LONG, id_slot=1, n_predict=6, temperature=0))
        status, saved = await act(server, 1, "save", filename="chat.bin")
        assert (
            status == 200
            and saved["n_saved"] >= len(LONG)
            and saved["n_written"] == (tmp_path / "chat.bin").stat().st_size
        )
        assert set(saved) == {"id_slot", "filename", "n_saved", "n_written", "timings"}
        await server.post("/v1/cache/reset", {})
        going_on = LONG + first["content"] + " And so on."
        _, cold = await server.post(
            "/completion", asking("/completion", going_on, n_predict=6, temperature=0, cache_prompt=False)
        )
    async with real(family, mlx_thread, tmp_path) as server:
        status, restored = await act(server, 3, "restore", filename="chat.bin")
        assert status == 200, restored
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        grown = {
            "prompt": [*first_tokens(server, LONG), *server.scheduler.slots[3].content[1][len(LONG) :], 40, 41, 42]
        }
        _, warm = await server.post("/completion", grown | {"n_predict": 6, "temperature": 0})
        _, twin = await server.post("/completion", grown | {"n_predict": 6, "temperature": 0, "cache_prompt": False})
        assert warm["timings"]["cache_n"] >= len(LONG) and warm["content"] == twin["content"]
        assert cold["timings"]["cache_n"] == twin["timings"]["cache_n"] == 0


def first_tokens(server, text):
    return server.services.live.model.tokenizer.encode(text, add_special=False)


async def test_a_chat_saved_before_a_restart_hits_after_it(mlx_thread, tmp_path):
    async with real("qwen3_next", mlx_thread, tmp_path) as server:
        chat = Chat(server, "s")
        await chat.turn("What is the tallest mountain?")
        slot = next(s.id for s in server.scheduler.slots.all if s.sequence)
        await act(server, slot, "save", filename="chat")
        messages = chat.messages
    async with real("qwen3_next", mlx_thread, tmp_path) as server:
        await act(server, 0, "restore", filename="chat")
        _, told = await server.post("/v1/cache/explain", {"messages": messages, "prompt_cache_key": "s"})
        assert told["best"]["same_session"] and told["template_sig"]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
async def test_erasing_forgets(family, mlx_thread, tmp_path):
    async with real(family, mlx_thread, tmp_path) as server:
        body = asking("/completion", LONG, id_slot=0, n_predict=4, ignore_eos=True)
        await server.post("/completion", body)
        status, erased = await act(server, 0, "erase")
        assert (status, erased) == (200, {"id_slot": 0, "n_erased": len(LONG) + 4})
        assert server.services.store.num_entries == server.services.snapshots.num_entries == 0
        assert (await act(server, 0, "erase"))[1]["n_erased"] == 0
        assert "id_task" not in (await server.get("/slots"))[1][0]


async def test_a_salted_slot_is_saved_restored_and_erased_by_its_salt_only(mlx_thread, tmp_path):
    async with real("llama", mlx_thread, tmp_path) as server:
        await server.post("/completion", asking("/completion", LONG, id_slot=0, n_predict=4, cache_salt="tenant"))
        for action in ("save", "erase"):
            status, body = await act(server, 0, action, filename="f")
            assert (status, body["error"]["param"]) == (400, "cache_salt")
        assert (await act(server, 0, "save", filename="f", cache_salt="tenant"))[0] == 200
        assert b"tenant" not in (tmp_path / "f").read_bytes()
        await server.post("/v1/cache/reset", {})
        for salt in ({}, {"cache_salt": "other"}):
            assert (await act(server, 0, "restore", filename="f", **salt))[1]["error"]["param"] == "cache_salt"
        assert (await act(server, 0, "restore", filename="f", cache_salt="tenant"))[0] == 200
        for salt, hits in ({}, False), ({"cache_salt": "tenant"}, True):
            _, body = await server.post("/completion", asking("/completion", LONG, n_predict=1, **salt))
            assert (body["timings"]["cache_n"] > 0) is hits


async def test_what_left_no_trace_is_saved_as_nothing(mlx_thread, tmp_path):
    async with real("llama", mlx_thread, tmp_path) as server:
        await server.post("/completion", asking("/completion", LONG, id_slot=0, n_predict=4, cache_prompt=False))
        assert (await act(server, 0, "save", filename="f"))[1]["n_saved"] == 0
        status, body = await act(server, 1, "restore", filename="f")
        assert status == 200 and body["n_restored"] == 0


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a..b", "x" * 300, "a\x00b", "né", 5, None])
async def test_a_bad_filename_is_refused(name, mlx_thread, tmp_path):
    async with real("llama", mlx_thread, tmp_path) as server:
        for action in ("save", "restore"):
            status, body = await act(server, 0, action, filename=name)
            assert status == 400 and body["error"]["param"] == "filename"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/slots/x?action=save", "/slots/1.5?action=erase"])
async def test_a_bad_id_is_refused(path, tmp_path):
    async with serving(slot_save_path=str(tmp_path)) as server:
        status, body = await server.post(path, {})
    assert (status, body["error"]["message"]) == (400, "Invalid slot ID")


async def test_an_unknown_action_is_refused(tmp_path):
    async with serving(slot_save_path=str(tmp_path)) as server:
        for path in ("/slots/0?action=fly", "/slots/0"):
            status, body = await server.post(path, {})
            assert (status, body["error"]["message"]) == (400, "Invalid action")


async def test_damaged_cut_and_foreign_files_are_refused_and_leave_the_slot_empty(mlx_thread, tmp_path):
    async with real("llama", mlx_thread, tmp_path) as server:
        await server.post("/completion", asking("/completion", LONG, id_slot=0, n_predict=4))
        await act(server, 0, "save", filename="good")
        good = (tmp_path / "good").read_bytes()
        bad = {
            "missing": None,
            "empty": b"",
            "foreign": b"GGUF" + bytes(1000),
            "cut": good[:-100],
            "longer": good + b"x",
            "magic": good[:14],
            "header": good[:14] + b"{}\n" + good[-32:],
            **{
                f"flip{i}": good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :]
                for i in (0, 20, 200, len(good) // 2, -1 % len(good))
            },
        }
        for name, data in bad.items():
            if data is not None:
                (tmp_path / name).write_bytes(data)
            status, body = await act(server, 0, "restore", filename=name)
            assert status == 400 and body["error"]["message"].startswith("Unable to restore slot:"), name
            assert "id_task" not in (await server.get("/slots"))[1][0]
        assert (await act(server, 0, "restore", filename="good"))[0] == 200
    async with real("qwen3", mlx_thread, tmp_path) as server:
        status, body = await act(server, 0, "restore", filename="good")
        assert status == 400 and "another model" in body["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": [-1]},
        {"context": None},
        {"context": {}},
        {"dtypes": None},
        {"arrays": [{"shape": [8, 2, 99, 32], "dtype": "int32"}]},
        {"kind": "other"},
        {"kind": "snapshot", "leaves": None},
        {"fingerprint": 5},
        {"arrays": [{"shape": [0, 2**70], "dtype": "float32"}]},
        {"arrays": [{"shape": [8, 1, 99, 64], "dtype": "float32"}]},
        {"surplus": 1},
    ],
    ids=str,
)
async def test_a_file_with_a_right_digest_and_an_odd_header_is_refused_and_holds_nothing(change, mlx_thread, tmp_path):
    async with real("llama", mlx_thread, tmp_path) as server:
        await server.post("/completion", asking("/completion", LONG, id_slot=0, n_predict=4))
        await act(server, 0, "save", filename="good")
        await server.post("/v1/cache/reset", {})
        magic, line, rest = (tmp_path / "good").read_bytes().split(b"\n", 2)
        forged = magic + b"\n" + json.dumps(json.loads(line) | change).encode() + b"\n" + rest[:-32]
        (tmp_path / "forged").write_bytes(forged + hashlib.blake2b(forged, digest_size=32).digest())
        status, body = await act(server, 0, "restore", filename="forged")
        assert status == 400 and body["error"]["message"].startswith("Unable to restore slot:")
        assert server.services.store.nbytes == 0


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "qwen3_next"])
@pytest.mark.parametrize(
    "change", [{"arrays": []}, {"arrays": [None, None]}, {"offset": 7}, {"start": 1}, {"limit": 5}], ids=str
)
async def test_a_forged_snapshot_is_refused_and_the_server_goes_on(family, change, mlx_thread, tmp_path):
    async with real(family, mlx_thread, tmp_path) as server:
        asked = asking("/completion", LONG, id_slot=0, n_predict=4, temperature=0)
        await server.post("/completion", asked)
        await act(server, 0, "save", filename="good")
        await server.post("/v1/cache/reset", {})
        magic, line, rest = (tmp_path / "good").read_bytes().split(b"\n", 2)
        header = json.loads(line)
        matters = "arrays" in change or "limit" in change or header["leaves"][-1]["kind"] != "arrays"
        header["leaves"][-1] |= change
        forged = magic + b"\n" + json.dumps(header).encode() + b"\n" + rest[:-32]
        (tmp_path / "forged").write_bytes(forged + hashlib.blake2b(forged, digest_size=32).digest())
        assert (await act(server, 0, "restore", filename="forged"))[0] == (400 if matters else 200)
        status, body = await server.post("/completion", asked | {"prompt": LONG[:50] + "then otherwise"})
        _, cold = await server.post(
            "/completion", asked | {"prompt": LONG[:50] + "then otherwise", "cache_prompt": False}
        )
        assert status == 200 and body["content"] == cold["content"]
