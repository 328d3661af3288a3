"""What the fork server imports before it forks: everything that the product's processes and the tests' devices need."""

from __future__ import annotations

import contextlib
import errno
import socket
from multiprocessing import reduction

import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401  (torch imports it in a process's first training step, and that takes seconds)

from fleetdistill_lab.simulation import fleet  # noqa: F401
from fleetdistill_lab.simulation.links.device_host import preload
from fleetdistill_server.cli import app  # noqa: F401
from fleetdistill_server.engine import process  # noqa: F401
from fleetdistill_server.front import process as front_process  # noqa: F401

preload()
with contextlib.suppress(ImportError):  # not on every platform
    from fleetdistill_server.store import (
        object_blobs,  # noqa: F401
        postgres_database,  # noqa: F401
    )


def _receive_files(sock: socket.socket, size: int) -> list[int]:
    """Replaces `reduction.recvfds`, whose EOFError ends the server if a process is killed while it asks for another."""
    try:
        return receive(sock, size)
    except (EOFError, RuntimeError, OSError) as error:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the process that asked has ended") from error


receive, reduction.recvfds = reduction.recvfds, _receive_files
