"""A page in headless Chromium: loaded, measured, typed at, photographed.

Speaks the browser's own protocol over two pipes, so it needs no driver and opens no port.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# A shared machine may take long to start it; nothing waits this long where it works.
TIMEOUT_S = 90


def executable():
    """The browser's path, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab.

    Attributes:
        complaints: what the console, the page's scripts and its content policy said.
        requests: addresses that the page asked for, pictures inside it left out.
    """

    def __init__(self, profile: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._buffer = b""
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # The browser reads from 3 and writes to 4, so these two must not be in the way.
        to_child, from_child = _moved_up(to_child), _moved_up(from_child)

        def at_3_and_4() -> None:
            os.dup2(to_child, 3)
            os.dup2(from_child, 4)

        self._process = subprocess.Popen(
            [
                executable(), "--headless=new", "--remote-debugging-pipe", "--disable-gpu",
                "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions",
                f"--user-data-dir={profile}", "--no-sandbox", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=at_3_and_4, start_new_session=True,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        """Send a command and wait for its answer; events on the way are noted."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def show(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """Load a file at a size in CSS pixels; below 700 as on a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 700,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while (event := self._receive()).get("method") != "Page.loadEventFired":
            self._note(event)

    def evaluate(self, expression: str) -> object:
        """The value of a script's expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as a person would press it."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def photograph(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser and everything it started."""
        for fd in (self._out, self._in):
            os.close(fd)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT_S)
            data = os.read(self._in, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser ended" if ready else "the browser does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(parameters))
        elif event.get("method") == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith("data:"):
                self.requests.append(url)


def _moved_up(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
