"""A page in a headless Chromium, by the WebDriver protocol alone: nothing to install but the browser and its driver."""

import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "no Chromium with its chromedriver here"

_OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"up": "\ue013", "down": "\ue015", "enter": "\ue007", "escape": "\ue00c", "end": "\ue010", "right": "\ue014"}


class Browser:
    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path) -> None:
        self._call("POST", "url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns that runs in the page."""
        return self._call("POST", "execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"element/{self._find(selector)}/value", {"text": text})

    def texts(self, selector: str) -> list[str]:
        found = self.run(f"return [...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)")
        return [str(text) for text in found]

    def errors(self) -> list[str]:
        """What the page complained about since it was opened."""
        log = self._call("POST", "se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self._call("POST", "element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _call(self, method: str, path: str, body: object = None) -> Any:
        return _request(method, f"{self._session}/{path}", body)


@contextmanager
def browser(width: int = 1400) -> Iterator[Browser]:
    """A browser of its own, with a profile that is thrown away. Needs what :data:`MISSING` says is there."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            root = f"http://127.0.0.1:{_port(driver)}"
            arguments = [*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},1000"]
            chrome = {"goog:chromeOptions": {"binary": CHROMIUM, "args": arguments}}
            wanted = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}, **chrome}
            wanted["timeouts"] = {"implicit": 10_000}
            session = _request("POST", f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(f"{root}/session/{session}")
            finally:
                _request("DELETE", f"{root}/session/{session}")
        finally:
            driver.terminate()
            driver.wait(timeout=30)


def _port(driver: subprocess.Popen[str]) -> int:
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found.group(1))
    raise RuntimeError("chromedriver did not start")


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _request(method: str, address: str, body: object = None) -> Any:
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, sent, {"Content-Type": "application/json"}, method=method)
    try:
        with _direct.open(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
