"""The web page: how it is served, and in Chromium what a person sees and does there."""

import re

import orjson
import pytest

from mlxcel.api.page import add_page
from mlxcel.errors import ConfigError
from tests.defaults import settings
from tests.http.browser import browsing, chromium
from tests.http.serving import serving

READY = "document.querySelector('#state').textContent === 'Ready'"
IDLE = "document.querySelector('#send').textContent === 'Send'"
QUESTION = "a question that is long enough to be stored and found again "


async def fetch(server, path):
    async with server.session.get(path) as response:
        return response.status, response.headers, await response.text()


# --- how it is served


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_it_is_public_html_under_the_prefix(prefix):
    async with serving(api_prefix=prefix, api_key=("sesame",)) as server:
        for path in ("/", "/index.html"):
            status, headers, text = await fetch(server, prefix + path)
            assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert text.startswith("<!doctype html>")
        async with server.session.head(prefix + "/") as response:
            assert response.status == 200


async def test_without_ui_there_is_no_page():
    async with serving(ui=False) as server:
        assert [(await server.get(path))[0] for path in ("/", "/index.html")] == [404, 404]


async def test_while_the_model_loads_it_is_503_and_the_page_nevertheless():
    async with serving(loaded=False) as server:
        status, _, text = await fetch(server, "/")
        assert status == 503 and "<!doctype html>" in text
        assert (await fetch(server, "/v1/models"))[0] == 503
    async with serving(loaded=False, ui=False) as server:
        assert (await fetch(server, "/"))[0] == 503


async def test_nothing_in_it_is_fetched_from_elsewhere_and_no_other_script_may_run():
    async with serving() as server:
        _, headers, text = await fetch(server, "/")
    assert set(re.findall(r"https?://[^'\" )]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert all(at.startswith("data:") for at in re.findall(r'\b(?:src|href|action)="([^"]*)"', text))
    assert "@import" not in text and "url(" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert re.search(r"script-src 'sha256-[^']+';", policy)


async def test_a_folder_of_ones_own_is_served_in_its_place(tmp_path):
    (tmp_path / "secret.txt").write_text("not in the folder")
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "index.html").write_text("<p>mine")
    (folder / "style.css").write_text("p {}")
    async with serving(static_path=str(folder)) as server:
        assert (await fetch(server, "/"))[2] == "<p>mine"
        assert (await fetch(server, "/style.css"))[2] == "p {}"
        assert (await server.get("/health"))[1] == {"status": "ok"}, "routes win"
        for path in ("/none.css", "/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt"):
            assert (await fetch(server, path))[0] == 404
        assert (await server.post("/style.css", {}))[0] == 404
    async with serving(static_path=str(folder), api_key=("sesame",), api_prefix="/x") as server:
        assert [(await fetch(server, path))[0] for path in ("/x/", "/x/style.css")] == [200, 401]


def test_a_folder_that_is_not_there_stops_the_start():
    with pytest.raises(ConfigError, match="^--path /no/such: no such directory$"):
        add_page(None, settings(static_path="/no/such"))


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


async def open_page(page, server, prefix=""):
    await page.open(f"http://127.0.0.1:{server.port}{prefix}/")


async def ask(page, text):
    """One question and its whole answer."""
    asked = await page.evaluate("document.querySelectorAll('.turn.model').length")
    await page.click("#prompt")
    await page.type(text)
    await page.press("Enter")
    await page.until(f"{IDLE} && document.querySelectorAll('.turn.model .facts').length > {asked}")


async def begin_babbling(page, server):
    """An answer without end, held after its first words."""
    await page.click("#prompt")
    await page.type("babble for ever")
    await page.press("Enter")
    await server.until(lambda: len(server.engine.plans) > 30)
    server.engine.gate.clear()
    await page.until("document.querySelector('.turn.model .said').textContent.length > 20")


async def last_answer(page):
    return await page.evaluate("[...document.querySelectorAll('.turn.model .said')].at(-1).innerText")


def check_quiet(page, server):
    """Nothing went wrong, and no other host was asked for anything."""
    assert page.errors == []
    own = f"http://127.0.0.1:{server.port}/"
    assert page.requests and [url for url in page.requests if not url.startswith((own, "data:"))] == []


async def test_a_conversation_is_answered_and_its_second_turn_moves_the_cache_numbers(browser):
    async with serving() as server, browsing(browser) as page:
        await open_page(page, server)
        await page.until(READY)
        assert await page.text("#lookups") == "no lookup yet" and await page.text("#entries") == "0"
        await ask(page, QUESTION + "<<hello>>")
        assert await last_answer(page) == "hello"
        await page.until("document.querySelector('#lookups').textContent === '0 of 1 lookup'")
        assert await page.text("#recent .tag") == "miss: empty"
        await ask(page, "and one more <<good bye>>")
        assert await last_answer(page) == "good bye"
        await page.until("document.querySelector('#hit-rate').textContent === '50 %'")
        saved = server.services.store.totals.tokens_reused
        assert saved > len(QUESTION) and await page.text("#saved") == str(saved)
        assert await page.text("#entries") == str(server.services.store.num_entries)
        assert await page.text("#recent .tag") == "hit"
        assert (await page.text("#recent li")).startswith(f"{saved} cached, ")
        assert f"{saved} of " in await page.evaluate("document.querySelectorAll('.facts')[1].textContent")
        memory = await page.evaluate("document.querySelector('[role=meter]').getAttribute('aria-valuenow')")
        assert int(memory) == server.services.store.nbytes
        check_quiet(page, server)


async def test_snapshots_have_their_own_meter_and_may_be_unknown_to_the_server(browser):
    async with serving() as server, browsing(browser) as page:
        await page.resize(1280, 800)
        await open_page(page, server)
        await page.until(READY)
        stats = (await server.get("/v1/cache/stats"))[1]
        kept = {"entries": 3, "bytes": 2048, "lookups": 0}
        snapshots = {"entries": 2, "bytes": 2048, "capacity_bytes": 4096, "lookups": 4, "hits": 3, "tokens_reused": 70}
        with_snapshots = stats | kept | {f"snapshot_{name}": value for name, value in snapshots.items()}
        without = {name: value for name, value in stats.items() if not name.startswith("snapshot_")}
        drawn = "[showCache({}), document.querySelector('#cache-title').parentElement.innerText][1]"
        text = await page.evaluate(drawn.format(orjson.dumps(with_snapshots).decode()))
        assert "75 %" in text and "3 of 4 lookups" in text and "70" in text and "2 as snapshots" in text
        assert "Memory of snapshots" in text and "2.0 KiB of 4.0 KiB" in text and "Memory of prefixes" not in text
        text = await page.evaluate(drawn.format(orjson.dumps(without).decode()))
        assert "no lookup yet" in text and "Memory of prefixes" in text and "snapshots" not in text
        assert "NaN" not in text and "undefined" not in text
        for changes, told in (({"reuse": "none"}, "state cannot be stored"), ({"enabled": False}, "cache is off")):
            assert told in await page.evaluate(drawn.format(orjson.dumps(stats | changes).decode()))
        assert "every prompt is computed whole" not in await page.evaluate(drawn.format(orjson.dumps(stats).decode()))
        check_quiet(page, server)


async def test_stop_ends_the_stream_keeps_what_was_said_and_frees_the_slot(browser):
    async with serving() as server, browsing(browser) as page:
        await open_page(page, server)
        await page.until(READY)
        await begin_babbling(page, server)
        assert await page.text("#send") == "Stop"
        await page.until("document.querySelector('#slots').textContent === '1 / 4'")
        await page.click("#send")
        await page.until(f"{IDLE} && document.querySelector('.facts').textContent === 'stopped'")
        server.engine.gate.set()
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
        assert re.fullmatch("x{20,}", await last_answer(page))
        await ask(page, "<<still there>>")
        assert await last_answer(page) == "still there"
        check_quiet(page, server)


async def test_a_new_chat_forgets_the_old_one_and_leaves_a_running_answer(browser):
    async with serving() as server, browsing(browser) as page:
        await open_page(page, server)
        await page.until(READY)
        await begin_babbling(page, server)
        await page.click("#new")
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 0
        server.engine.gate.set()
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
        await ask(page, "<<fresh>>")
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 2
        check_quiet(page, server)


async def test_what_a_model_or_a_person_writes_is_text_and_never_markup(browser):
    said = "<img src=x onerror=alert(1)> <b>bold</b>\n\n```html\n<i>code</i>\n```\n"
    async with serving() as server, browsing(browser) as page:
        await open_page(page, server)
        await page.until(READY)
        await ask(page, f"<u>me</u> <<{said}>>")
        assert await last_answer(page) == "<img src=x onerror=alert(1)> <b>bold</b>\n<i>code</i>"
        assert await page.evaluate("document.querySelectorAll('.turn :is(img, b, i, u)').length") == 0
        assert await page.text(".turn.model pre") == "<i>code</i>"
        check_quiet(page, server)


async def test_a_question_that_is_refused_says_why_and_stays_to_be_changed(browser):
    async with serving(bounds={"n_ctx": 200}) as server, browsing(browser) as page:
        await open_page(page, server)
        await page.until(READY)
        await page.click("#prompt")
        await page.type("long " * 60)
        await page.press("Enter")
        await page.until("document.querySelector('.failure[role=alert]')")
        assert "exceeds the available context size (200 tokens)" in await page.text(".failure")
        assert await page.evaluate("document.querySelector('#prompt').value") == ("long " * 60).strip()
        assert await page.evaluate("document.querySelectorAll('.turn').length") == 0


async def test_a_key_is_asked_for_until_it_is_right_and_kept_for_the_tab(browser):
    async with serving(api_key=("sesame",), api_prefix="/llm") as server, browsing(browser) as page:
        await open_page(page, server, "/llm")
        await page.until("document.querySelector('#key').open")
        await page.press("Escape")
        await page.until("!document.querySelector('#locked').hidden")
        await page.click("#unlock")
        for key in ("wrong", "sesame"):
            await page.until("document.querySelector('#key').open")
            await page.type(key)
            await page.press("Enter")
            await page.until(f"sessionStorage.getItem('key') === '{key}'")
        await page.until(f"{READY} && document.querySelector('#locked').hidden")
        await ask(page, "<<come in>>")
        assert await last_answer(page) == "come in"
        await open_page(page, server, "/llm")
        await page.until(READY)
        assert await page.evaluate("sessionStorage.getItem('key')") == "sesame"
        assert all("401" in error for error in page.errors)


async def test_a_server_that_loads_is_waited_for(browser):
    async with serving(loaded=False) as server, serving() as other, browsing(browser) as page:
        await open_page(page, server)
        await page.until("document.querySelector('#state').textContent === 'Loading model'")
        server.services.loaded = other.services.loaded
        await page.until(READY)
        assert await page.text("#name") == "tiny"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(320, 568), (360, 740), (768, 1024), (1280, 800)])
async def test_it_fits_every_screen_in_both_themes(browser, width, height, theme):
    async with serving() as server, browsing(browser) as page:
        await page.resize(width, height, mobile=width < 800)
        await page.use_theme(theme)
        await open_page(page, server)
        await page.until(READY)
        await ask(page, f"{'w' * 300} <<{'x' * 400}>>")
        views = ["chat", "cache"] if width < 800 else [""]
        for view in views:
            if view:
                await page.click(f"nav button[data-view={view}]")
            widest = "Math.max(...[...document.querySelectorAll('body *')].map((e) => e.getBoundingClientRect().right))"
            assert await page.evaluate(widest) <= width
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate("document.querySelector('#state').scrollWidth") <= (
                await page.evaluate("document.querySelector('#state').clientWidth")
            )
        assert await page.evaluate(LOW_CONTRAST) == []
        check_quiet(page, server)


# Every text that is shown, against the nearest background behind it; 4.5 is what WCAG asks of small text.
LOW_CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = numbers(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (numbers(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('body *')]
    .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
      return [e.id || e.className || e.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    })
    .filter(([, ratio]) => ratio < 4.5);
})()"""


async def test_every_control_has_a_name_and_can_be_reached_with_the_keyboard(browser):
    async with serving() as server, browsing(browser) as page:
        await page.resize(1280, 800)
        await open_page(page, server)
        await page.until(READY)
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        shown = [node for node in tree if not node["ignored"]]
        named = {
            (node["role"]["value"], node["name"]["value"])
            for node in shown
            if node["role"]["value"] in ("button", "textbox", "log", "meter", "complementary", "region")
        }
        assert ("textbox", "Message") in named and ("button", "Send") in named and ("log", "Conversation") in named
        assert all(name for _, name in named), named
        reached = set()
        for _ in range(10):
            await page.press("Tab")
            reached.add(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"log", "prompt", "send", "new"} <= reached
