"""A real browser under a test's control: headless Chromium, spoken to over two pipes in its DevTools protocol."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
PATIENCE = 30  # seconds


class Browser:
    """Reads commands from descriptor 3 and answers on descriptor 4, each message ended by a zero byte."""

    def __init__(self, profile: Path):
        (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]  # out of the way of 3 and 4
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", "--no-first-run", "--hide-scrollbars", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["bash", "-c", shell, *command], pass_fds=theirs, **quiet)
        for fd in (theirs_in, theirs_out, *theirs):
            os.close(fd)
        self._in, self._out, self._read, self._number = ours_in, ours_out, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command; events that arrive before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") != self._number:
                self.events.append(found)
            elif "error" in found:
                raise RuntimeError(f"{method}: {found['error']}")
            else:
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def event(self, method: str, session: str) -> None:
        """Wait for an event."""
        while not any(found["method"] == method and found.get("sessionId") == session for found in self.events):
            self.events.append(self._next())

    def open(self, url: str) -> "Page":
        """A page of its own, with storage of its own: as good as another person's browser."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.load("Page.navigate", url=url)
        return page

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)


class Page:
    def __init__(self, browser: Browser, session: str):
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def load(self, method: str = "Page.reload", **params: Any) -> None:
        loaded = "Page.loadEventFired"
        self.browser.events = [event for event in self.browser.events if event["method"] != loaded]
        self.call(method, **params)
        self.browser.event(loaded, self.session)

    def value(self, expression: str) -> Any:
        """What an expression of the page's script is worth."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (
                f"never true: {expression}; the page says: {self.value('document.body.innerText')}"
            )
            time.sleep(0.02)

    def text(self, name: str) -> str:
        return self.value(f"document.getElementById({name!r}).textContent")

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r" if key == "Enter" else key} if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def complaints(self) -> list[str]:
        """Errors of scripts and what a policy blocked."""
        ours = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [json.dumps(e) for e in ours if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def screenshot(self, file: Path, width: int, height: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
