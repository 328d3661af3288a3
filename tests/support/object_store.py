"""An S3-compatible object store for tests, from the package `moto`: a server on 127.0.0.1, with objects in memory."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import urllib.request
from collections.abc import Iterator

_numbers = itertools.count(1)


class ObjectStore:
    """A running server.

    Attributes:
        environment: Variables with which the AWS tools find it.
    """

    def __init__(self, port: int) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "in-no-file",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.make_bucket("fleetdistill")

    def make_bucket(self, name: str) -> None:
        """Makes an empty bucket."""
        request = urllib.request.Request(f"{self.environment['AWS_ENDPOINT_URL']}/{name}", method="PUT")
        with urllib.request.urlopen(request):  # moto does not look at signatures
            pass

    @staticmethod
    def missing() -> str:
        """Why no server can be started here; empty if one can."""
        lacking = [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else ""

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[ObjectStore]:
        """Runs a server in a thread until the end of the block."""
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        try:
            yield cls(server.get_host_and_port()[1])
        finally:
            server.stop()

    def prefix(self) -> str:
        """The URL of an empty prefix."""
        return f"s3://fleetdistill/{os.getpid()}-{next(_numbers)}"
