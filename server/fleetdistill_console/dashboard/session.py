"""Who may open the pages: whoever knows the token, in a signed session, from the dashboard's own origin and name."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import monotonic
from urllib.parse import parse_qs

from fastapi import FastAPI
from jinja2 import DictLoader
from nicegui import core
from nicegui.client import templates
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleetdistill.errors import ConfigurationError, in_words

LOGIN = "/login"
LOGOUT = "/logout"
HEALTH = "/health"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_SESSION = "session"
"""Where a cookie has the name of its session."""
_PUBLIC = ("/static/", "/favicon.ico")
"""Paths of files that are the same for everybody and needed by the page for signing in."""
_MIN_CHARACTERS = 32
_HEALTH_SECONDS = 8.0
"""Time for which the health check waits for the first answer of the server that is shown."""
_MAX_FORM = 4096
_MAX_WRONG = 20
"""Largest number of wrong tokens from an address within a minute."""
_MAX_ADDRESSES = 1000
_TEMPLATE = "index.html"
"""NiceGUI's template of all pages."""
_NONCE = "fleetdistill.nonce"
"""Where a request has the nonce with which the scripts in its page are marked."""
_POLICY = (
    # NiceGUI's pages compile their templates in the browser, which needs unsafe-eval. Nothing else may be loaded.
    "default-src 'self'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """Who may open the pages of one dashboard.

    Attributes:
        token: Whoever knows it may sign in.
        names: Host names and addresses under which browsers may open the pages; loopback names are always allowed.
        port: Port of the dashboard; browsers send the cookies of all ports of a host.
        problem: Returns what is wrong with the server that is shown, empty if nothing is; None if that is not known.
    """

    token: str = field(repr=False)
    names: Sequence[str]
    port: int
    problem: Callable[[], str | None]


def read_token(file: Path) -> str:
    """Returns the token in a file. Raises ConfigurationError if there is none, or if it could be guessed."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--token-file {file} cannot be read: {in_words(error)}") from error
    if len(token) < _MIN_CHARACTERS or not token.isascii() or len(token.split()) > 1:
        text = f"must contain one word of at least {_MIN_CHARACTERS} ASCII characters"
        raise ConfigurationError(f"--token-file {file} {text}; create it with: openssl rand -hex 32")
    return token


def new_token() -> str:
    """Returns a token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def protect(web: FastAPI, access: Access) -> None:
    """Lets only those use an application who know the token. Call it before NiceGUI is attached."""
    web.add_middleware(_Gate, token=access.token, problem=access.problem)
    web.add_middleware(
        SessionMiddleware,
        secret_key=secrets.token_hex(32),  # a cookie is worth nothing after a restart, or elsewhere
        session_cookie=f"fleetdistill-{access.port}",
        max_age=None,
        same_site="lax",
    )
    names = [*LOOPBACK_NAMES, *access.names]
    web.add_middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    core.sio.eio.cors_allowed_origins = None  # only its own; NiceGUI allows every origin
    _mark_scripts()


class _Gate:
    """Refuses what another origin asks for, and everything without a session but signing in and the health check."""

    def __init__(self, app: ASGIApp, token: str, problem: Callable[[], str | None]) -> None:
        self._app = app
        self._token = token
        self._sessions = OpenSessions()
        self._attempts = _Attempts()
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        answer = await self._answer(asked, receive)
        if answer is not None or scope["type"] == "http":
            scope[_NONCE] = secrets.token_urlsafe(16)
            await (answer or self._app)(scope, receive, _with_headers(send, scope[_NONCE]))
        else:
            await self._sessions.serve(_named(asked), self._app, scope, receive, send)

    async def _answer(self, asked: HTTPConnection, receive: Receive) -> Response | None:
        """Returns the response if the request is not for the pages, else None."""
        if _is_foreign(asked):
            return PlainTextResponse("refused: another origin asked for this", 403)
        path = asked.url.path
        method = asked.scope.get("method", "")
        if path == HEALTH:
            return await self._health()
        if path == LOGIN:
            return await self._login(Request(asked.scope, receive))
        token = asked.query_params.get("token", "")
        if method and token and not self._attempts.allowed(_address(asked)):
            return _form(429, "Too many wrong tokens came from this address; try again in a minute.")
        if method and token and not self._knows(token):
            self._attempts.note(_address(asked))
        elif method and token:
            self._sign_in(asked)
            return RedirectResponse(asked.url.remove_query_params("token").replace(scheme="", netloc=""), 303)
        if self._sessions.has(_named(asked)):
            return self._sign_out(asked) if (path, method) == (LOGOUT, "POST") else None
        return None if method and path.startswith(_PUBLIC) else _form(401)

    async def _health(self) -> Response:
        """Says whether the server that is shown works, waiting until that is known; strangers learn no more."""
        until = time.monotonic() + _HEALTH_SECONDS
        while (problem := self._problem()) is None and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if problem == "":
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the server needs attention; sign in to the dashboard to see why\n", 503)

    async def _login(self, request: Request) -> Response:
        if request.scope["type"] != "http" or request.method != "POST":
            return _form(200)
        if not self._attempts.allowed(_address(request)):
            return _form(429, "Too many wrong tokens came from this address; try again in a minute.")
        body = await _body(request)
        if body is None:
            return _form(413, "This is too long for a token.")
        (token,) = parse_qs(body, encoding="utf-8", errors="replace").get("token", [""])[:1]
        if not self._knows(token.strip()):
            self._attempts.note(_address(request))
            return _form(403, "This is not the token of this dashboard.")
        self._sign_in(request)
        return RedirectResponse("/", 303)

    def _sign_in(self, asked: HTTPConnection) -> None:
        self._sessions.end(_named(asked))
        asked.session.clear()  # whoever planted a session before does not know this one
        asked.session[_SESSION] = self._sessions.begin()

    def _sign_out(self, asked: HTTPConnection) -> Response:
        self._sessions.end(_named(asked))
        asked.session.clear()
        return RedirectResponse(LOGIN, 303)

    def _knows(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


_MAX_SESSIONS = 1000
"""Largest number of open sessions; a further one ends the oldest."""
_DISCONNECT: Message = {"type": "websocket.disconnect", "code": 1001}


class OpenSessions:
    """The open sessions, in memory. Used by one event loop."""

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Event] = {}

    def begin(self) -> str:
        """Begins a session and returns its name, which cannot be guessed."""
        if len(self._ended) >= _MAX_SESSIONS:
            self.end(next(iter(self._ended)))
        name = secrets.token_urlsafe(32)
        self._ended[name] = asyncio.Event()
        return name

    def has(self, name: str) -> bool:
        """Returns whether a session is open."""
        return name in self._ended

    def end(self, name: str) -> None:
        """Ends a session and its websockets; a session that is not open is ignored."""
        ended = self._ended.pop(name, None)
        if ended is not None:
            ended.set()

    async def serve(self, name: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the websocket of an open session; the application sees it disconnect when the session ends."""
        ended = self._ended[name]
        ending = asyncio.create_task(ended.wait())

        async def receiving() -> Message:
            message = asyncio.ensure_future(receive())
            await asyncio.wait({message, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.is_set():
                return await message
            message.cancel()
            return _DISCONNECT

        try:
            await app(scope, receiving, send)
        finally:
            ending.cancel()


class _Attempts:
    """The wrong tokens of each address within the last minute."""

    def __init__(self) -> None:
        self._wrong: dict[str, list[float]] = {}

    def allowed(self, address: str) -> bool:
        """Returns whether an address may try another token."""
        return len([at for at in self._wrong.get(address, ()) if at > monotonic() - 60]) < _MAX_WRONG

    def note(self, address: str) -> None:
        """Notes a wrong token; the address that failed longest ago is dropped if there are too many."""
        times = [*self._wrong.pop(address, [])[-_MAX_WRONG:], monotonic()]
        if len(self._wrong) >= _MAX_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[address] = times


def _address(asked: HTTPConnection) -> str:
    return asked.client.host if asked.client else ""


async def _body(request: Request) -> str | None:
    """Returns the body of a request; None if it is longer than a form with a token, whose rest is not read."""
    body = b""
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FORM:
                return None
    return body.decode("ascii", "replace")


def _is_foreign(asked: HTTPConnection) -> bool:
    """Returns whether a page of another origin made a request, except that a person may follow a link from anywhere.

    Other ports of the same host are other origins too, but browsers send them the same cookies.
    """
    own = f"{asked.url.scheme.replace('ws', 'http', 1)}://{asked.headers.get('host', '')}"
    if asked.headers.get("origin", own).lower() != own.lower():
        return True
    follows = (asked.headers.get("sec-fetch-mode"), asked.headers.get("sec-fetch-dest")) == ("navigate", "document")
    elsewhere = asked.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return elsewhere and not (follows and asked.scope.get("method") == "GET")


def _named(asked: HTTPConnection) -> str:
    """Returns the name of the session in the cookie of a request, empty without one."""
    return str(asked.session.get(_SESSION, ""))


def _mark_scripts() -> None:
    """Gives the scripts in NiceGUI's template the nonce of their request.

    The template is changed, not the page: a script in a text that is filled in has no nonce and does not run.
    """
    environment = templates.env
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, _TEMPLATE)
    marked = source.replace("<script", f"<script nonce=\"{{{{ request.scope['{_NONCE}'] }}}}\"")
    environment.loader = DictLoader({_TEMPLATE: marked})


def _with_headers(send: Send, nonce: str) -> Send:
    headers = {**_HEADERS, "Content-Security-Policy": _POLICY.format(nonce=nonce)}

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            message["headers"] = [*message.get("headers", []), *more]
        await send(message)

    return sending


def _form(status: int, error: str = "") -> HTMLResponse:
    said = f'<p role="alert" class="fd-notice fd-error">{escape(error)}</p>' if error else ""
    return HTMLResponse(_FORM.replace("{error}", said), status, {"Cache-Control": "no-store"})


_FORM = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · fleetdistill</title>
<link rel="stylesheet" href="/static/dashboard.css">
<body class="fd-login">
<main class="fd-panel">
<h1 class="fd-h1">Sign in</h1>
<p>Open the address that <code>fleetdistill dashboard</code> printed, or enter the token in it.</p>
{error}
<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Sign in</button>
</form>
</main>
</body>
</html>
"""
