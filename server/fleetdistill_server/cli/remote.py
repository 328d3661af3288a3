"""The remote commands: what an operator or viewer asks a server over mTLS, as the views that local commands print."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from fleetdistill.errors import ConfigurationError, LinkError
from fleetdistill.link.credentials import load_credentials
from fleetdistill.link.grpc_link import CALL_SECONDS, errors_of
from fleetdistill.wire.v1 import operations_pb2, operations_pb2_grpc
from fleetdistill_server.security.tokens import MOST_TOKENS
from fleetdistill_server.store.database import Row
from fleetdistill_server.views.runs import View

# Who follows a run may hear nothing for a long time; so it is noticed when the server's machine is gone.
_TOKENS_AT_ONCE = 1000
_ALWAYS = ("rounds", "bytes", "bytes_by_kind", "reported_uploads", "events")
"""Lists of a run that are shown empty too."""
_LISTS = ("rounds", "test_accuracy_of_answers", "leave_one_out", *_ALWAYS[1:])
_OPTIONS = [("grpc.keepalive_time_ms", 20_000)]


class RemoteServer:
    """Calls `OperationsService`. Use `connect`."""

    def __init__(self, server: str, stub: Any) -> None:
        self._server = server
        self._stub = stub

    def runs(self) -> View:
        """All runs."""
        rows: list[Row] = []
        more = True
        while more:
            answer = self._call("ListRuns", operations_pb2.ListRunsRequest(skip=len(rows)))
            rows += [_row(one) for one in answer.runs]
            more = answer.more and bool(answer.runs)
        return View({"runs": rows})

    def run(self, name: str) -> View:
        """One run, as `views.run`; of a server that knows nothing else, its rounds and events."""
        answer = self._call("ShowRun", operations_pb2.ShowRunRequest(run=name))
        lists = {one: [_READ.get(one, _row)(row) for row in getattr(answer, one)] for one in _LISTS}
        complete = answer.HasField("totals")
        always = _ALWAYS if complete else ("rounds", "events")
        totals = {name: value for name, value in _row(answer.totals).items() if value is not None} if complete else {}
        return View({one: rows for one, rows in lists.items() if rows or one in always}, {**_row(answer.run), **totals})

    def follow(self, name: str) -> Iterator[list[Row]]:
        """Yields what is new in a run, as `watch.follow` does, until it is over."""
        with errors_of(self._server):
            for answer in self._stub.WatchRun(operations_pb2.WatchRunRequest(run=name)):
                told = [(one.WhichOneof("change"), one) for one in answer.changes]
                # A newer server may tell of what is not known here.
                yield [{"kind": kind, **_row(getattr(one, kind))} for kind, one in told if kind]

    def revoke(self, device: str, reason: str) -> bool:
        """Revokes a device; False if it was so before."""
        request = operations_pb2.RevokeDeviceRequest(device=device, reason=reason)
        return bool(self._call("RevokeDevice", request).changed)

    def cancel(self, run: str) -> bool:
        """Ends a run for good; False if it was over before."""
        return bool(self._call("CancelRun", operations_pb2.CancelRunRequest(run=run)).changed)

    def tokens(self, count: int, seconds: float, run: str, devices: Sequence[str] = ()) -> list[str]:
        """Makes enrolment tokens, as many at a time as fit into an answer."""
        if devices:
            groups = [devices[at : at + _TOKENS_AT_ONCE] for at in range(0, len(devices), _TOKENS_AT_ONCE)]
            requests = [
                operations_pb2.CreateTokensRequest(devices=group, expires_seconds=seconds, run=run) for group in groups
            ]
            return [token for one in requests for token in self._call("CreateTokens", one).tokens]
        made: list[str] = []
        while not made or len(made) < count:
            wanted = min(count - len(made), _TOKENS_AT_ONCE) if count <= MOST_TOKENS else count  # which is refused
            request = operations_pb2.CreateTokensRequest(count=wanted, expires_seconds=seconds, run=run)
            made += self._call("CreateTokens", request).tokens
        return made

    def _call(self, method: str, request: Any) -> Any:
        with errors_of(self._server):
            try:
                return getattr(self._stub, method)(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                text = f"the server {self._server} is of an earlier release without {method}"
                raise LinkError(f"{text}; update it, or give the command on its machine with --store") from error


@contextlib.contextmanager
def connect(server: str, identity: Path | None) -> Iterator[RemoteServer]:
    """A connection as the person whose identity is in a directory.

    Raises:
        ConfigurationError: No identity is given, or it cannot be read.
        LinkError: The server is away, or its certificate is not of the CA in the identity.
        RefusedError: This person may not do that.
    """
    if identity is None:
        raise ConfigurationError("--server needs --identity DIR, a directory that `fleetdistill pki issue` has made")
    with grpc.secure_channel(server, load_credentials(identity).channel(), _OPTIONS) as channel:
        yield RemoteServer(server, operations_pb2_grpc.OperationsServiceStub(channel))


def _row(message: Any) -> Row:
    """A message as a row; absent figures are None."""
    fields = message.DESCRIPTOR.fields
    return {
        one.name: None if one.has_presence and not message.HasField(one.name) else getattr(message, one.name)
        for one in fields
    }


def _answers(message: operations_pb2.AnswersOfDevice) -> Row:
    """Accuracies of a device as a row; those that it has not told are None."""
    return {"device": message.device, **{one.name: _row(one)["accuracy"] for one in message.answers}}


_READ: dict[str, Callable[[Any], Row]] = {"test_accuracy_of_answers": _answers}
"""Lists whose rows are not the fields of a message."""
