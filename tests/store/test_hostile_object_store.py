"""An object store whose replies are none: every call of the blobs returns or raises an error of the tree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.wire_samples import make_payload

from fleetdistill.errors import StoreError

pytest.importorskip("s3fs")

from fleetdistill_server.store.object_blobs import ObjectBlobs

DIGEST = bytes.fromhex("ab" * 32)
Reply = tuple[int, bytes, dict[str, str]]


def _listing(size: str, modified: str, key: str = f"prefix/ab/{DIGEST.hex()}.safetensors") -> Reply:
    entry = f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{modified}</LastModified></Contents>"
    return 200, f"<ListBucketResult><KeyCount>1</KeyCount>{entry}</ListBucketResult>".encode(), {}


REPLIES: dict[str, Reply] = {
    "refusal with escapes": (403, b"<Error><Code>\x1b[31m</Code><Message>no</Message></Error>", {}),
    "no XML": (200, b"\x00\xff<html>", {}),
    "nothing": (200, b"", {}),
    "a date that is none": _listing("5", "never"),
    "no date": _listing("5", ""),
    "a size that is none": _listing("many", "2020-01-01T00:00:00Z"),
    "a key outside": _listing("5", "2020-01-01T00:00:00Z", "prefix/../../etc/passwd"),
    "a header that is no date": (200, b"", {"Last-Modified": "tomorrow"}),
    "redirects without end": (301, b"<Error><Code>PermanentRedirect</Code></Error>", {}),
}
CALLS: dict[str, Callable[[ObjectBlobs], object]] = {
    "check": lambda blobs: blobs.check(),
    "open": lambda blobs: blobs.open(DIGEST, verify=True),
    "get_state": lambda blobs: blobs.get_state(DIGEST),
    "has": lambda blobs: blobs.has(DIGEST),
    "age_seconds": lambda blobs: blobs.age_seconds(DIGEST),
    "held": lambda blobs: blobs.held(),
    "drop": lambda blobs: blobs.drop(DIGEST),
    "quarantine": lambda blobs: blobs.quarantine(DIGEST),
    "drop_quarantined": lambda blobs: blobs.drop_quarantined([DIGEST]),
    "trim": lambda blobs: blobs.trim(),
    "put": lambda blobs: blobs.put(make_payload()),
    "put_state": lambda blobs: blobs.put_state(b"state"),
}


class _Server(ThreadingHTTPServer):
    reply: Reply = (200, b"", {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # replies to `Expect: 100-continue`
    server: _Server

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body, headers = self.server.reply
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def blobs(server: _Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectBlobs:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return ObjectBlobs(tmp_path / "blobs", "s3://bucket/prefix")


def _error_of(call: Callable[[ObjectBlobs], object], blobs: ObjectBlobs) -> str:
    try:
        call(blobs)
    except StoreError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("reply", REPLIES)
def test_invalid_replies_are_store_errors(reply: str, server: _Server, blobs: ObjectBlobs, tmp_path: Path) -> None:
    server.reply = REPLIES[reply]
    for name, call in CALLS.items():
        text = _error_of(call, blobs)
        assert text.isprintable(), f"{name}: {text}"
    assert not list(tmp_path.glob("blobs/??/*")), "a reply was stored as a payload"


def test_an_invalid_age_is_named(server: _Server, blobs: ObjectBlobs) -> None:
    server.reply = REPLIES["a header that is no date"]
    with pytest.raises(StoreError, match='reply of the object store is invalid: Invalid timestamp "tomorrow"'):
        blobs.age_seconds(DIGEST)
    server.reply = REPLIES["redirects without end"]
    with pytest.raises(StoreError, match="invalid: it redirects without end"):
        blobs.age_seconds(DIGEST)
