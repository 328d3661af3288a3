"""What a caller learns of an error of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fleetdistill.errors import FleetDistillError, NoSpaceError, StoreError, StoreUnavailableError
from fleetdistill_server.front.errors import abort


class Ended(Exception):
    """Ends a call, as gRPC does."""


class Context:
    """Keeps what a caller gets."""

    sent = b""

    async def abort(self, code: grpc.StatusCode, text: str, trailers: Any) -> None:
        self.sent = text.encode() + trailers[0][1]
        raise Ended


@pytest.mark.parametrize("kind", [NoSpaceError, StoreError, StoreUnavailableError])
def test_no_path_of_the_server_is_in_a_refusal(kind: type[FleetDistillError]) -> None:
    context = Context()
    with pytest.raises(Ended):
        asyncio.run(abort(context, kind("writing /srv/fleet/store/blobs/ab: the disk is full")))
    assert context.sent
    assert b"/srv/fleet" not in context.sent
