"""A headless Chromium that tests drive: the DevTools protocol over a pipe, without a driver or a package.

Messages are JSON objects, each followed by a zero byte, on the browser's file descriptors 3 and 4
(`--remote-debugging-pipe`; https://chromedevtools.github.io/devtools-protocol/). Clicks, keys and pointer moves are
events of the browser's input, not calls of a page's functions.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The installed browser; None if there is none."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
PATIENCE = 60.0
"""Seconds to wait for something on a busy machine."""

KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), "ArrowRight": ("", 39), "ArrowLeft": ("", 37)}
"""Keys that tests press -> their text and code."""

CONTRAST = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = (below, color) => {  // a colour of any notation, drawn over another
        canvas.clearRect(0, 0, 1, 1);
        for (const each of [below, color]) { canvas.fillStyle = each; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
        return `rgb(${r}, ${g}, ${b})`;
    };
    const light = (color) => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const behind = (element) => {
        const chain = [];
        for (let at = element; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
        return chain.reduce(over, "rgb(255, 255, 255)");
    };
    const worst = {};
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        const apart = element.closest("dialog, .sr, noscript, option, style, title");
        if (!own || apart || !element.checkVisibility()) continue;
        const back = behind(element);
        const style = getComputedStyle(element);
        const [a, b] = [light(back), light(over(back, element instanceof SVGElement ? style.fill : style.color))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) worst[`${element.tagName}.${element.className} ${element.textContent.slice(0, 20)}`] = ratio;
    }
    return worst;
})()"""
"""Elements with text whose contrast is below 4.5, WCAG 2.2's level AA."""


LEFT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
"""What the browser says of an expression of a page that is left"""


class NavigatedError(Exception):
    """The browser left the page before it had evaluated an expression."""


class Page:
    """One page of a fresh browser. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        """Start the browser with `folder` for its files."""
        assert PROGRAM is not None
        self.errors: list[str] = []
        """Errors and warnings of the console, and exceptions of scripts"""
        self.requests: list[str] = []
        """Addresses of all requests"""
        self.statuses: dict[str, int] = {}
        """Of the last response of each address"""
        self.headers: dict[str, dict[str, str]] = {}
        self._number, self._rest, self._answers = 0, b"", {}
        self._session: str | None = None
        inner_read, self._write = os.pipe()
        self._read, inner_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (inner_read, inner_write)]
        command = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        arguments = [PROGRAM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._browser = subprocess.Popen(
            ["/bin/bash", "-c", command, *arguments],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for end in (inner_read, inner_write, *ends):
            os.close(end)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.look(1280, 800)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.terminate()
        self._browser.wait(20)
        os.close(self._read)
        os.close(self._write)

    # --- the protocol ---

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while self._number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(self._number)
        if answer.get("error", {}).get("message") in LEFT:
            raise NavigatedError
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self, deadline: float) -> None:
        """Read what has come, and wait for something until then."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "the browser does not answer"
        data = os.read(self._read, 2**20)
        assert data, "the browser has ended"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Network.responseReceived":
            response = params["response"]
            self.statuses[response["url"]] = response["status"]
            self.headers[response["url"]] = {name.lower(): value for name, value in response["headers"].items()}

    # --- the page ---

    def go(self, address: str) -> None:
        """Load an address."""
        self.js("window.left = true")
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && !window.left")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it resolves to.

        `NavigatedError` if the page is left while the browser evaluates it.
        """
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true, in this page or in the one that the browser goes to."""
        deadline = time.monotonic() + seconds
        while not self._is_true(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; errors: {self.errors}"
            time.sleep(0.03)

    def _is_true(self, expression: str) -> bool:
        """Whether an expression is true now; not, if the page is left meanwhile."""
        try:
            return bool(self.js(f"Boolean({expression})"))
        except NavigatedError:
            return False

    def look(self, width: int, height: int, *, scheme: str = "light", phone: bool = False, scale: float = 1) -> None:
        """Set the window's size, the colour scheme that the user prefers, and whether it is a phone's touch screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def move(self, selector: str) -> tuple[float, float]:
        """Move the pointer to an element, and return where it is."""
        x, y = self.js(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "nearest"}});
            const box = element.getClientRects()[0];
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str) -> None:
        """Click an element."""
        x, y = self.move(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector: str) -> None:
        """Touch an element."""
        x, y = self.js(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "nearest"}});
            const box = element.getClientRects()[0];
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def type(self, text: str) -> None:
        """Type a text into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key of `KEYS`."""
        text, code = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def texts(self, selector: str) -> list[str]:
        """The text of each element that matches."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")

    def screenshot(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
