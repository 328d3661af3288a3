"""HTTP/2 by hand, for callers that no gRPC client would be: streams whose messages never end, and many of them."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_BYTES = 16384
_INITIAL_WINDOW, _WINDOW_SETTING, _STREAMS_SETTING = 65535, 4, 3


def message(size: int, data: bytes) -> bytes:
    """A gRPC message that says it has `size` bytes, and the data that come of it."""
    return struct.pack(">BI", 0, size) + data


@dataclass
class Stream:
    """One call: what is still to be sent, how much the server lets in, and whether it has ended it."""

    unsent: bytes
    window: int
    end: bool
    sent: int = 0
    over: bool = False


@dataclass
class RawConnection:
    """A connection that keeps to HTTP/2 and to flow control, and to nothing else. Made by `raw_connection`."""

    sock: socket.socket
    streams: dict[int, Stream] = field(default_factory=dict)
    closed: bool = False
    max_streams: int | None = None
    _window: int = _INITIAL_WINDOW
    _stream_window: int = _INITIAL_WINDOW
    _read: bytes = b""
    _out: bytes = b""

    def begin(self, path: str, data: bytes, *, end: bool = False) -> Stream:
        """Begins a call and has these bytes sent as soon as the server lets them in."""
        number = 2 * len(self.streams) + 1
        stream = self.streams[number] = Stream(data, self._stream_window, end)
        self._out += _frame(HEADERS, END_HEADERS, number, _headers(path))
        return stream

    def pump(self, seconds: float, quiet: float = 1.0) -> None:
        """Sends and reads until the connection is closed, the time is up, or nothing has moved for `quiet` seconds."""
        until, moved = time.monotonic() + seconds, time.monotonic()
        while not self.closed and time.monotonic() < until and time.monotonic() - moved < quiet:
            if self._step():
                moved = time.monotonic()

    def _step(self) -> bool:
        self._fill()
        readable, writable, _ = select.select([self.sock], [self.sock] if self._out else [], [], 0.05)
        moved = False
        try:
            if writable:
                moved = self._send()
            if readable:
                moved = self._receive() or moved
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError:  # the server may close the connection at any time, also between two writes
            self.closed = True
        return moved

    def _send(self) -> bool:
        sent = self.sock.send(self._out[: 1 << 18])
        self._out = self._out[sent:]
        return sent > 0

    def _receive(self) -> bool:
        data = self.sock.recv(1 << 16)
        self.closed = not data
        self._read += data
        while len(self._read) >= 9 and len(self._read) >= 9 + int.from_bytes(self._read[:3]):
            size = int.from_bytes(self._read[:3])
            kind, flags, number = struct.unpack(">BBI", self._read[3:9])
            self._take(kind, flags, number, self._read[9 : 9 + size])
            self._read = self._read[9 + size :]
        return bool(data)

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:
        stream = self.streams.get(number)
        if kind == SETTINGS and not flags & ACK:
            self._settings(body)
        elif kind == PING and not flags & ACK:
            self._out += _frame(PING, ACK, 0, body)
        elif kind == WINDOW_UPDATE and number == 0:
            self._window += int.from_bytes(body)
        elif kind == WINDOW_UPDATE and stream is not None:
            stream.window += int.from_bytes(body)
        elif stream is not None and (kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM)):
            stream.over, stream.unsent = True, b""

    def _settings(self, body: bytes) -> None:
        for at in range(0, len(body), 6):
            name, value = struct.unpack(">HI", body[at : at + 6])
            if name == _WINDOW_SETTING:
                for stream in self.streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif name == _STREAMS_SETTING:
                self.max_streams = value
        self._out += _frame(SETTINGS, ACK, 0, b"")

    def _fill(self) -> None:
        """As much of what the streams have as the windows let in, while the socket takes it."""
        for number, stream in self.streams.items():
            while stream.unsent and len(self._out) < 1 << 20:
                size = min(len(stream.unsent), stream.window, self._window, _FRAME_BYTES)
                if size <= 0:
                    break
                last = stream.end and size == len(stream.unsent)
                self._out += _frame(DATA, END_STREAM if last else 0, number, stream.unsent[:size])
                stream.unsent = stream.unsent[size:]
                stream.window -= size
                stream.sent += size
                self._window -= size


@contextlib.contextmanager
def raw_connection(port: int, tls: ssl.SSLContext | None = None) -> Iterator[RawConnection]:
    """A connection to the loopback, over TLS where a context is given."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname="localhost")
    sock.setblocking(False)
    connection = RawConnection(sock)
    connection._out = _PREFACE + _frame(SETTINGS, 0, 0, b"")
    try:
        yield connection
    finally:
        sock.close()


def stranger_tls() -> ssl.SSLContext:
    """Of somebody who has no certificate and looks at none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + struct.pack(">BBI", kind, flags, number) + body


def _headers(path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()
