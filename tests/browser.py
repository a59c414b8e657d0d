"""A headless Chromium, driven through its DevTools protocol over a pair of pipes: no package and no port is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

SECONDS = 30  # a busy machine starts a browser slowly
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A browser that looks for nothing outside: no updates, no first-run pages.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
    "--window-size=1500,1300",
)  # fmt: skip


def find() -> str | None:
    """The browser's path: CHROMIUM, or the first of the usual names."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser."""

    def __init__(self, profile: Path) -> None:
        path = find()
        assert path is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol is fixed to file descriptors 3 and 4, which a shell can set up.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, path, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received, self._number, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def close(self) -> None:
        os.close(self._out)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, path: Path) -> None:
        """Load a file, and wait until its scripts have run."""
        self._call("Page.enable")
        self._call("Page.navigate", url=path.as_uri())
        self._event("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        """The window, in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """The window, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window, in CSS pixels."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _event(self, method: str) -> None:
        while self._message().get("method") != method:
            pass

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, f"the browser did not answer in {SECONDS} s"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._received += more
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)
