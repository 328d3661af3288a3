"""Whether a server speaks TLS: gRPC says of a plain-text call to such a server only that it cannot be reached."""

from __future__ import annotations

import socket
import ssl


def speaks_tls(server: str, seconds: float = 2.0) -> bool:
    """Tries a TLS handshake and sends nothing else. False also for a server that is away.

    Args:
        server: `host:port`.
        seconds: How long to wait for each answer.
    """
    host, _, port = server.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, so nobody need be trusted
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # such as for a certificate that it wants
    except (OSError, ValueError, OverflowError):
        return False
