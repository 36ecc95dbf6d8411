"""A headless Chromium driven over its debugging pipe: real keys and clicks, no package beyond the standard library."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0
"""Seconds until an answer must be there; a loaded machine is slow to start a browser."""


def chromium() -> str | None:
    """The browser's path; None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page: commands by name, and every error, console message and request since it was opened."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.session: str | None = None
        self.count, self.rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        os.write(
            self.to_browser,
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0",
        )
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Until an event has come."""
        while not any(found.get("method") == event for found in self.events):
            self.events.append(self._receive())

    def value(self, script: str) -> Any:  # noqa: ANN401 - whatever the page answers
        """What an expression is on the page."""
        return self.send("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, as a person presses it."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """The mouse on the middle of an element."""
        script = """(e => {
            e.scrollIntoView({block: 'center', behavior: 'instant'});
            const box = e.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        })"""
        place = self.value(f"{script}(document.querySelector({selector!r}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def complaints(self) -> list[object]:
        """Exceptions, console messages and log entries."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that were asked for, those inside the page left out."""
        found = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        addresses = [str(event["request"]["url"]) for event in found]
        return [address for address in addresses if not address.startswith("data:")]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self.from_browser, 1 << 16)
            assert data, "the browser has ended"
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def opened(page: Path, profile: Path, width: int = 1200, height: int = 900) -> Iterator[Tab]:
    """A page from disk in a new browser, watched from before it loads."""
    program = chromium()
    assert program
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The browser reads 3 and writes 4: high numbers first, so that neither is overwritten on the way.
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, 20) for handle in (theirs_in, theirs_out)]
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]

    def hand_over() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [program, *options, "about:blank"], preexec_fn=hand_over, close_fds=False, stderr=subprocess.DEVNULL
    )
    for handle in (theirs_in, theirs_out, *high):
        os.close(handle)
    try:
        tab = Tab(ours_out, ours_in)
        target = tab.send("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        tab.send("Emulation.setDeviceMetricsOverride", **size)
        tab.send("Page.navigate", url=page.resolve().as_uri())
        tab.wait_for("Page.loadEventFired")
        yield tab
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(ours_out)
        os.close(ours_in)
