"""`fleetdistill dashboard` as a process, and a headless Chromium that looks at it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.processes import COMMAND, PATIENCE_SECONDS, wait_until

PICTURES = Path(__file__).parents[2] / "out" / "dashboard"
"""Where pictures of the pages are kept, to be looked at; git ignores them."""
TAKE_PICTURES = "FLEETDISTILL_TESTS_PICTURES"
"""Variable with which pictures are taken."""
TOKEN = secrets.token_urlsafe(32)
"""The token of every dashboard of this process; the fixture `page` sends it."""
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Path of a browser that can be driven, or None."""
    return next((path for path in map(shutil.which, _CHROMIUM) if path), None)


def browser_arguments() -> list[str]:
    """Options of the browser: as root it only starts without its sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@contextlib.contextmanager
def dashboard(work: Path, *options: str, token: str | None = TOKEN) -> Iterator[str]:
    """Runs `fleetdistill dashboard` in a directory on a free port; yields its address without a slash at the end.

    Without `token` the command makes one and prints it to dashboard.log. In tests the process is forked, unless the
    test is marked `cold_start`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    log = work / "dashboard.log"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "token"
        file.write_text(token or "")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*COMMAND, "dashboard", "--port", "0", *([f"--token-file={file}"] if token else []), *options],
                cwd=work,
                env=environment,  # without NiceGUI's own behaviour in tests
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(lambda: "the dashboard is at" in log.read_text() or process.poll() is not None, "the dashboard")
            result = re.search(r"(https?://[^/\s]+)/\S*;", log.read_text())
            assert result, log.read_text()
            yield result[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_SECONDS)


class Watched:
    """What happened in a browser's page: requests, and messages on its console.

    Attributes:
        requests: Addresses of all requests.
        errors: Errors on the console, and exceptions of scripts.
    """

    def __init__(self, page: Any) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))


def picture(page: Any, name: str) -> None:
    """Keeps pictures of the whole page in light and dark, for people; in `make test-all`."""
    if not os.environ.get(TAKE_PICTURES):
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_function(
            "scheme => document.body.classList.contains(`body--${scheme}`)", arg=scheme
        )  # the colours follow the browser's preference
        page.screenshot(path=PICTURES / f"{name}-{scheme}.png", full_page=True)
    page.emulate_media(color_scheme="light")
