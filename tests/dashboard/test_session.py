"""Who may open the pages: not without the token, not from another origin, not under another host name."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.dashboards import TOKEN, dashboard
from support.live_front import write_server_config
from support.processes import PATIENCE_SECONDS, wait_until
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from fleetdistill_server.cli.app import app
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
POLLING = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
RUN = "digits-of-the-north"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store with one run."""
    folder = tmp_path_factory.mktemp("session")
    store = Store.open(folder / "store")
    store.runs.begin(RUN, {"run": {"name": RUN, "method": "fedavg", "rounds": 3}})
    store.close()
    return folder


@pytest.fixture(scope="module")
def address(work: Path) -> Iterator[str]:
    """A dashboard of that store."""
    with dashboard(work, "--store", str(work / "store")) as address:
        yield address


def client(address: str, **more: Any) -> httpx.Client:
    """A client that keeps cookies and follows no redirects."""
    return httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, **more)


@pytest.fixture
def signed_in(address: str) -> Iterator[httpx.Client]:
    """A client with a session."""
    with client(address) as opened:
        assert opened.post("/login", data={"token": TOKEN}).status_code == 303
        yield opened


def cookie(signed_in: httpx.Client) -> tuple[str, str]:
    """Name and value of the session's cookie."""
    (result,) = signed_in.cookies.jar
    assert result.value is not None
    return result.name, result.value


def websocket_status(address: str, **headers: str) -> int:
    """The status with which the dashboard answers the opening of a websocket; 101 if it is open."""
    try:
        with connect(address.replace("http", "ws", 1) + SOCKET, additional_headers=headers, open_timeout=60):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


@pytest.mark.parametrize("path", ["/", f"/runs/{RUN}", "/compare", POLLING, "/?token=guessed", "/login/../"])
def test_a_request_without_a_session_is_refused(address: str, path: str) -> None:
    answer = httpx.get(address + path, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 401
    assert "Sign in" in answer.text
    assert "set-cookie" not in answer.headers


def test_a_wrong_token_opens_no_session(address: str) -> None:
    with client(address) as opened:
        refused = opened.post("/login", data={"token": TOKEN[:-1]})
        assert (refused.status_code, "not the token" in refused.text) == (403, True)
        assert opened.get("/").status_code == 401


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 403),
        (b"token=%ff%00&token=a&b&&=", 403),
        (b"--x\r\nContent-Disposition: form-data\r\n", 403),
        (b"token=" + b"a" * 5000, 413),
        (b"&" * (64 << 20), 413),
    ],
    ids=["nothing", "odd characters", "half a part", "too long", "64 MiB"],
)
def test_form_without_token_is_refused_without_traceback_in_log(
    work: Path, address: str, kind: str, body: bytes, status: int
) -> None:
    try:
        answer = httpx.post(f"{address}/login", content=body, headers={"Content-Type": kind}, timeout=PATIENCE_SECONDS)
        assert answer.status_code == status
    except httpx.WriteError:  # the dashboard did not wait for the rest
        assert status == 413
    assert "Traceback" not in (work / "dashboard.log").read_text()


@pytest.fixture
def own(work: Path, tmp_path: Path) -> Iterator[str]:
    """A dashboard for one test, because wrong tokens are counted."""
    with dashboard(tmp_path, "--store", str(work / "store")) as address:
        yield address


@pytest.mark.long
def test_wrong_tokens_of_an_address_are_limited(own: str) -> None:
    with client(own) as opened:
        tried = [opened.post("/login", data={"token": f"wrong {number}"}).status_code for number in range(20)]
        assert tried == [403] * 20
        assert opened.post("/login", data={"token": TOKEN}).status_code == 429
        assert opened.get("/", params={"token": TOKEN}).status_code == 429
        other = httpx.HTTPTransport(local_address="127.0.0.2")
    with client(own, transport=other) as opened:
        assert opened.post("/login", data={"token": TOKEN}).status_code == 303


def test_the_token_opens_a_session_and_is_gone_from_the_address(address: str) -> None:
    with client(address) as opened:
        answer = opened.get("/compare", params={"runs": RUN, "token": TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, f"/compare?runs={RUN}")
        assert {"httponly", "samesite=lax"} <= set(answer.headers["set-cookie"].replace(" ", "").lower().split(";"))
        assert opened.get(answer.headers["location"]).status_code == 200


@pytest.mark.long
def test_printed_address_signs_in_and_token_file_is_not_printed(work: Path, address: str) -> None:
    assert TOKEN not in (work / "dashboard.log").read_text()
    other = work / "other"
    other.mkdir()
    with dashboard(other, "--store", str(work / "store"), token=None):
        printed = re.search(r"http://\S+(?=;)", (other / "dashboard.log").read_text())
        assert printed
        with httpx.Client(follow_redirects=True, timeout=PATIENCE_SECONDS) as opened:
            assert opened.get(printed[0]).status_code == 200


@pytest.mark.long
def test_a_session_of_one_dashboard_is_not_valid_at_another(work: Path, signed_in: httpx.Client) -> None:
    other = work / "second"
    other.mkdir()
    with dashboard(other, "--store", str(work / "store")) as second, client(second) as own:
        own.post("/login", data={"token": TOKEN})
        name, value = cookie(own)
        assert name != cookie(signed_in)[0]
        tried = httpx.get(second, headers={"Cookie": f"{name}={cookie(signed_in)[1]}"}, timeout=PATIENCE_SECONDS)
        assert tried.status_code == 401
        accepted = httpx.get(second, headers={"Cookie": f"{name}={value}"}, timeout=PATIENCE_SECONDS)
        assert accepted.status_code == 200


@pytest.mark.parametrize(
    ("host", "status"), [("attacker.example", 400), ("attacker.example:80", 400), ("localhost", 200), ("[::1]", 200)]
)
def test_only_the_dashboards_own_host_names_are_accepted(signed_in: httpx.Client, host: str, status: int) -> None:
    assert signed_in.get("/", headers={"Host": host, "Cookie": "=".join(cookie(signed_in))}).status_code == status


def test_a_websocket_needs_a_session_and_the_own_origin(address: str, signed_in: httpx.Client) -> None:
    session = "=".join(cookie(signed_in))
    assert websocket_status(address, Cookie=session, Origin=address) == 101
    assert websocket_status(address, Origin=address) == 401
    for origin in ("http://attacker.example", "http://127.0.0.1:1", "null"):
        assert websocket_status(address, Cookie=session, Origin=origin) == 403


@pytest.mark.parametrize(("site", "mode", "dest", "status"), [
    ("same-origin", "cors", "empty", 200),
    ("cross-site", "navigate", "document", 200),
    ("cross-site", "navigate", "iframe", 403),
    ("same-site", "no-cors", "script", 403),
    ("same-site", "cors", "empty", 403),
])  # fmt: skip
def test_other_origins_may_only_link_to_pages(
    signed_in: httpx.Client, site: str, mode: str, dest: str, status: int
) -> None:
    sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    assert signed_in.get("/", headers=sent).status_code == status


def receive_all(socket: ClientConnection) -> None:
    """Receives until the websocket is closed, which is an exception; a timeout is another one."""
    while True:
        socket.recv(timeout=PATIENCE_SECONDS)


def test_an_unknown_address_is_a_page_with_links(address: str) -> None:
    with client(address) as opened:
        opened.post("/login", data={"token": TOKEN})
        reply = opened.get("/run/digits")
        assert (reply.status_code, "nonce-" in reply.headers["Content-Security-Policy"]) == (404, True)
        assert "There is no page /run/digits." in reply.text
        assert opened.get("/static/nothing.css").status_code == 404
        assert "Page not found" not in client(address).get("/run/digits").text, "strangers learn of no page"


def test_sign_out_ends_session_copied_cookie_and_websockets(address: str) -> None:
    with client(address) as opened, client(address) as other:
        for item in (opened, other):
            item.post("/login", data={"token": TOKEN})
        copied = {"Cookie": "=".join(cookie(opened)), "Origin": address}
        with connect(address.replace("http", "ws", 1) + SOCKET, additional_headers=copied, open_timeout=60) as socket:
            assert opened.get("/logout").status_code == 404  # a link cannot sign out
            assert opened.post("/logout", headers={"Origin": "http://attacker.example"}).status_code == 403
            assert opened.get("/").status_code == 200
            assert opened.post("/logout").headers["location"] == "/login"
            assert not list(opened.cookies.jar)
            with pytest.raises(ConnectionClosed):
                receive_all(socket)
        assert httpx.get(address, headers=copied, timeout=PATIENCE_SECONDS).status_code == 401
        assert websocket_status(address, **copied) == 401
        assert other.get("/").status_code == 200


@pytest.mark.long
def test_sign_out_moves_all_browser_windows_to_sign_in_page(address: str, page: Any) -> None:
    page.goto(address)
    page.get_by_text(RUN).wait_for()
    second = page.context.new_page()
    second.goto(f"{address}/compare")
    second.get_by_role("heading", name="Compare").wait_for()
    page.get_by_role("button", name="Sign out").click()
    for item in (page, second):
        item.get_by_role("heading", name="Sign in").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Sign in").wait_for()
    assert RUN not in page.content()


@pytest.mark.long
def test_sign_out_reaches_a_page_that_has_never_connected(address: str, page: Any) -> None:
    page.goto(address)
    page.get_by_text(RUN).wait_for()
    second = page.context.new_page()
    second.route_web_socket("**/_nicegui_ws/**", lambda socket: socket.close())
    second.route("**/_nicegui_ws/**", lambda route: route.abort())
    second.goto(f"{address}/compare")
    second.get_by_role("heading", name="Compare").wait_for()
    page.get_by_role("button", name="Sign out").click()
    second.get_by_role("heading", name="Sign in").wait_for()


def test_the_health_check_needs_no_session_and_reveals_nothing(address: str, work: Path) -> None:
    with serve_lock.take(work / "store", "", 1):
        wait_until(lambda: httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS).text == "ok\n", "the server", 15)
        answer = httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    elsewhere = httpx.get(f"{address}/health", headers={"Host": "attacker.example"}, timeout=PATIENCE_SECONDS)
    assert elsewhere.status_code == 400


@pytest.mark.long
def test_health_check_and_pages_say_server_is_not_well(address: str, work: Path, page: Any) -> None:
    page.goto(address)
    page.get_by_text(RUN).wait_for()
    assert page.get_by_role("alert").count() == 0
    write_server_config(work / "store", ServerConfig(server=ServerSection(keep_free_bytes=1 << 60)))
    with serve_lock.take(work / "store", "", 1):
        page.get_by_role("alert").get_by_text("so uploads are refused: ").wait_for()
        answer = httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS)
        assert (answer.status_code, answer.text.startswith("the server needs attention")) == (503, True)
        write_server_config(work / "store", ServerConfig(server=ServerSection(keep_free_bytes=0)))
        page.get_by_role("alert").wait_for(state="hidden")
        wait_until(lambda: httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS).status_code == 200, "the limit")
    stopped = lambda: httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS).status_code == 503  # noqa: E731
    wait_until(stopped, "the server, which has stopped", 15)
    assert page.get_by_role("alert").count() == 0, "a page shows what a server has left"


@pytest.mark.parametrize("content", ["short", "two words" * 8, ""])
def test_a_token_that_could_be_guessed_is_an_error(work: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    result = CliRunner().invoke(
        app, ["dashboard", "--store", str(work / "store"), "--port", "0", "--token-file", str(tmp_path / "token")]
    )
    assert result.exit_code == 1
    assert "openssl rand -hex 32" in result.stderr


class _Attack(http.server.BaseHTTPRequestHandler):
    """Serves an empty page of another origin."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>other</title><body>other"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def other_origin() -> Iterator[str]:
    """Address of another origin, which browsers send the same cookies: another port of 127.0.0.1."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Attack))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


READ = "url => fetch(url, {credentials: 'include'}).then(answer => answer.status, () => 'blocked')"
SEND = """url => fetch(url, {credentials: 'include', mode: 'no-cors', method: 'POST', body: '40'})
  .then(answer => answer.status, () => 'blocked')"""
OPEN = """url => new Promise(done => {
  const socket = new WebSocket(url);
  socket.onopen = () => done('open');
  socket.onerror = () => done('refused');
})"""
FRAME = """url => new Promise(done => {
  const frame = document.createElement('iframe');
  frame.onload = () => {
    let text = 'unreadable';
    try { text = frame.contentDocument.body.innerText; } catch {}
    done(text);
  };
  frame.src = url;
  document.body.append(frame);
})"""


@pytest.mark.long
def test_page_of_other_origin_in_browser_cannot_read_or_act(browser: Any, address: str, other_origin: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}/?token={TOKEN}")
    page.get_by_text(RUN).wait_for()
    socket = address.replace("http", "ws", 1) + SOCKET
    assert page.evaluate(READ, f"{address}/") == 200
    assert page.evaluate(OPEN, socket) == "open"

    answers: list[tuple[str, int]] = []
    page.goto(other_origin)
    page.on("response", lambda answer: answers.append((answer.url, answer.status)))
    assert page.evaluate(READ, f"{address}/") == "blocked"
    assert page.evaluate(OPEN, socket) == "refused"
    page.evaluate(SEND, address + POLLING)
    assert page.evaluate(FRAME, f"{address}/") == "unreadable"
    assert {status for url, status in answers if url.startswith(address)} <= {403}
    assert all(RUN not in frame.content() for frame in page.frames if frame.url.startswith("http"))
    context.close()
