"""Detects servers that require TLS; for a plain-text call, gRPC only reports that they are unreachable."""

from __future__ import annotations

import socket
import ssl


def accepts_tls(server: str, seconds: float = 2.0) -> bool:
    """Returns whether a server accepts a TLS handshake; False if it is unavailable. Sends nothing else.

    Args:
        server: `"host:port"` of the server.
        seconds: Timeout of connecting and of each read, in seconds.
    """
    host, _, port = server.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # no data are sent, so there is nothing to protect
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # for example because the server requires a client certificate
    except (OSError, ValueError, OverflowError):
        return False
