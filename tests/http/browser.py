"""Headless Chromium over the DevTools protocol: just enough to use a page as a person does, and to watch it.

One browser serves all tests; each page has a profile of its own. A page keeps what it asked the network for and what
went to its console.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # it needs namespaces that containers lack, and the only pages opened are ours
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]
PATIENCE = 30  # seconds for anything that must come soon


def installed() -> str | None:
    """The path of the first that is there."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def find_chromium() -> str:
    """Its path. Fails where `make browser` would bring it, skips where nothing can."""
    if found := installed():
        return found
    if os.environ.get("WITHOUT_BROWSER"):
        pytest.skip("Chromium is missing and `make browser` could not install it")
    if shutil.which("apt-get") and os.geteuid() == 0:
        pytest.fail("Chromium is missing: run `make browser`, which installs Debian's package", pytrace=False)
    pytest.skip("Chromium is missing, and installing it takes apt-get and root")


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """A running browser's WebSocket address."""
    command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search(r"DevTools listening on (ws://\S+)", line):
                    yield found[1]
                    return
            pytest.fail(f"Chromium did not start:\n{said}")
        finally:
            process.terminate()
            process.stderr.close()


class Page:
    """A tab. `requests` are the addresses it asked for, `errors` what it complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self._loaded: set[str] = set()
        self._news = asyncio.Condition()

    async def listen(self) -> None:
        async for message in self._socket:
            event = orjson.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])
                async with self._news:
                    self._news.notify_all()

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        self._answers[id] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_str(orjson.dumps({"id": id, "method": method, "params": params, **session}).decode())
        async with asyncio.timeout(PATIENCE):
            answer = await self._answers[id]
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def attach(self) -> None:
        context = await self.call("Target.createBrowserContext", disposeOnDetach=True)
        target = await self.call("Target.createTarget", url="about:blank", **context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    # --- what a person does

    async def open(self, address: str) -> None:
        loader = (await self.call("Page.navigate", url=address))["loaderId"]
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: loader in self._loaded)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait for what must come soon, without guessing how soon."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not await self.evaluate(f"Boolean({condition})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"not yet {condition}; {self.errors}\n{text}") from None

    async def text(self, selector: str) -> str:
        return await self.evaluate(f"document.querySelector({selector!r}).innerText")

    async def click(self, selector: str) -> None:
        """With the mouse, at the middle of what must be there to be hit."""
        x, y = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}), b = e.getBoundingClientRect();"
            "const at = [b.x + b.width / 2, b.y + b.height / 2];"
            "if (!e.contains(document.elementFromPoint(...at))) throw new Error('covered'); return at; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, **more: Any) -> None:
        text = {"Enter": "\r"}.get(key, "")
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **given,
                **more,
            )

    async def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def use_theme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


@asynccontextmanager
async def browsing(address: str) -> AsyncIterator[Page]:
    """A page in the browser that listens at `address`."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.attach()
            yield page
        finally:
            listening.cancel()


if __name__ == "__main__":  # for `make browser`: whether there is one
    raise SystemExit(installed() is None)
