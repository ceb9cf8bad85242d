"""A headless Chromium for tests of pages, controlled over a pipe with the DevTools protocol."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
)  # fmt: skip


def chromium() -> str | None:
    """The path of the browser, if it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have numbers beyond 3 and 4."""
    low = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low]
    for end in low:
        os.close(end)
    return ends[0], ends[1]


class Browser:
    """`with Browser() as browser: page = browser.open(path, width=390, dark=True)`."""

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="embedtrain-browser-")
        (theirs_in, self._out), (self._in, theirs_out) = _pipe(), _pipe()
        # It reads from 3 and writes to 4, whatever numbers the pipes have here.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = [*QUIET, f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(chromium()), *arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(theirs_in, theirs_out),
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, *, width: int = 1440, height: int = 1000, dark: bool = False, scale: float = 1) -> None:
        """Load a file; `events` holds its requests and messages from here on. A picture has `scale` pixels for each."""
        mobile = width < 600
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < deadline, "the page did not load"
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, to: Path, *, top: int = 0, height: int | None = None) -> Path:
        """A picture of the whole page, or of a stretch of it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"], "scale": 1}
        kind = {"format": "webp", "quality": 80} if to.suffix == ".webp" else {"format": "png"}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip, **kind)
        to.write_bytes(base64.b64decode(shot["data"]))
        return to

    def requests(self) -> list[str]:
        """All requested addresses since the page was opened, its own first."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Errors and output of the page's script, and errors of the browser."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"])[:500] for event in self.events if event.get("method") in kinds]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], 60)
            assert ready, "Chromium does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
