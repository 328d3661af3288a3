"""Client for operators and viewers: calls a server over mTLS and returns the same views as the local commands.

Nothing is taken from the server but checked content, exported models and backups included.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import grpc
import tomli_w

from fleetdistill.errors import ConfigurationError, LinkError, ModelError, RefusedError, in_words
from fleetdistill.link.base import CALL_SECONDS
from fleetdistill.link.credentials import Credentials, load_credentials
from fleetdistill.link.grpc_link import errors_of
from fleetdistill.printable import printable
from fleetdistill.state.durable import keep_private, make_directory, rename_durably, sync_directory, sync_file
from fleetdistill.training.foreign_onnx import check_self_contained
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2, operations_pb2_grpc
from fleetdistill_server.operations.source import Exported, LocalStore, Source
from fleetdistill_server.security.certificates import holder_of
from fleetdistill_server.security.revocation import Revoked
from fleetdistill_server.security.tokens import MAX_TOKENS
from fleetdistill_server.service.creation import CREATION_SECONDS, NewRun
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.store.backup import BackedUp, check_backup, check_empty
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.retention import Freed, Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.texts import when
from fleetdistill_server.views.reading import FOR_OPERATORS, Query
from fleetdistill_server.views.runs import TableRow, View

__all__ = ["connect", "open_source"]

READ_SECONDS = 120.0
"""Longest duration of a read in seconds; a view of a large fleet takes several."""
MAX_READ_BYTES = 128 << 20
"""Largest size of one view in bytes; 100,000 devices have about 50 MB."""
MAX_READ_VALUES = 5_000_000
"""Largest number of values of one view, whose objects need about 100 bytes each; 100,000 devices have 2 million."""
_TOKENS_AT_ONCE = 1000
# `runs watch` may receive nothing for a long time; keepalive detects an unreachable server.
_OPTIONS = [("grpc.keepalive_time_ms", 20_000)]
STALL_SECONDS = 1800.0
"""Longest time without a part of a file in seconds: a store is verified before the first part of its backup."""
DELETION_SECONDS = 300.0
"""Time limit for deleting a run, whose payloads can be many."""
MAX_MODEL_BYTES = 2 << 30
"""Largest size of a model in bytes, that of a protobuf message."""
_NAMES = re.compile(r"backup/(manifest\.json|store\.sqlite|blobs/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors)|model\.onnx")


class OperatorClient(Source):
    """Client of `OperationsService`. Create it with `connect`."""

    is_remote = True

    def __init__(self, server: str, stub: Any, identity: Path) -> None:
        self.name = self._server = server
        self._identity = identity
        self._stub = stub

    def read(self, query: Query) -> View:
        """Reads one view, in as many messages as it needs."""
        request = operations_pb2.ReadRequest(
            **{name: value for name, value in asdict(query).items() if value is not None}
        )
        method = "ReadForOperators" if query.view in FOR_OPERATORS else "Read"
        with errors_of(self._server, self._identity):
            return _join(getattr(self._stub, method)(request, timeout=READ_SECONDS))

    def follow(self, name: str) -> Iterator[list[TableRow]]:
        """Yields the changes in a run until it ends, like `watch.follow`."""
        with errors_of(self._server, self._identity):
            for answer in self._stub.WatchRun(operations_pb2.WatchRunRequest(run=name)):
                result = [(change.WhichOneof("change"), change) for change in answer.changes]
                # A newer server may send kinds of changes that this version does not support.
                yield [{"kind": kind, **_row(getattr(one, kind))} for kind, one in result if kind]

    def revoke(self, device: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes a device permanently."""
        request = operations_pb2.RevokeDeviceRequest(device=device, reason=reason, confirmed=confirmed)
        reply = self._call("RevokeDevice", request)
        return Revoked(reply.changed, reply.known)

    def forget(self, run: str, device: str) -> bool:
        """Deletes a device's contributions to a run; returns whether that is done. If not, the server does it soon."""
        return bool(self._call("ForgetDevice", operations_pb2.ForgetDeviceRequest(run=run, device=device)).forgotten)

    def revoke_person(self, role: str, name: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes an operator or viewer permanently."""
        request = operations_pb2.RevokePersonRequest(role=role, name=name, reason=reason, confirmed=confirmed)
        try:
            reply = self._call("RevokePerson", request)
        except RefusedError as refusal:
            if confirmed and refusal.code == Code.REVOKED:  # the caller itself: its certificate admits no answer now
                return Revoked(changed=True, known=True)
            raise
        return Revoked(reply.changed, reply.known)

    def export(self, run: str, out: Path) -> Exported:
        """Writes a run's model to an ONNX file on this machine."""
        with errors_of(self._server, self._identity):
            return Exported(
                *receive_model(_parts(self._stub.ExportModel(operations_pb2.ExportModelRequest(run=run))), out)
            )

    def back_up(self, out: Path) -> BackedUp:
        """Writes a backup of the server's store to an empty directory on this machine."""
        check_empty(out)
        with errors_of(self._server, self._identity):
            return receive_backup(_parts(self._stub.BackUp(operations_pb2.BackUpRequest())), out)

    def create(self, run: NewRun) -> RunState:
        """Checks and creates a run. Relative paths belong to the server's directory."""
        request = operations_pb2.CreateRunRequest(
            run_toml=tomli_w.dumps(run.settings), start=run.start, clone_of=run.clone_of, changes=run.changes
        )
        return _state_of(self._call("CreateRun", request, CREATION_SECONDS).run)

    def change(self, run: str, status: str) -> RunState:
        """Starts, pauses, stops or cancels a run."""
        return _state_of(self._call("ChangeRun", operations_pb2.ChangeRunRequest(run=run, status=status)).run)

    def delete(self, run: str) -> Pruned | None:
        """Deletes a run with everything that belongs to it; returns None if it was deleted before."""
        reply = self._call("DeleteRun", operations_pb2.DeleteRunRequest(run=run), DELETION_SECONDS)
        if not reply.HasField("deleted"):
            return None
        gone = reply.deleted
        freed, later = Freed(gone.payloads, gone.bytes), Freed(gone.later_payloads, gone.later_bytes)
        return Pruned(gone.rounds, gone.events, gone.figures, freed, later)

    def roll_back(self, run: str, to: int) -> RolledBack:
        """Rolls a run back to the state after a round."""
        if to < 0:
            raise ConfigurationError(f"--to is {to}, must be at least 0")
        reply = self._call("RollBackRun", operations_pb2.RollBackRunRequest(run=run, to=to), DELETION_SECONDS)
        return RolledBack(reply.completed_rounds, reply.undone_rounds)

    def tokens(self, count: int, seconds: float, run: str, devices: Sequence[str] = ()) -> list[str]:
        """Creates and returns enrolment tokens, in batches that fit into one response."""
        if devices:
            groups = [devices[at : at + _TOKENS_AT_ONCE] for at in range(0, len(devices), _TOKENS_AT_ONCE)]
            requests = [
                operations_pb2.CreateTokensRequest(devices=group, expires_seconds=seconds, run=run) for group in groups
            ]
            return [token for request in requests for token in self._tokens(request)]
        made: list[str] = []
        while not made or len(made) < count:
            wanted = min(count - len(made), _TOKENS_AT_ONCE) if count <= MAX_TOKENS else count  # the server refuses it
            made += self._tokens(operations_pb2.CreateTokensRequest(count=wanted, expires_seconds=seconds, run=run))
        return made

    def _tokens(self, request: operations_pb2.CreateTokensRequest) -> list[str]:
        tokens = list(self._call("CreateTokens", request).tokens)
        if len(tokens) != (len(request.devices) or request.count) or not all(map(_is_token, tokens)):
            raise LinkError(f"the server {self._server} sent something else than the tokens that were asked for")
        return tokens

    def _call(self, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        with errors_of(self._server, self._identity):
            return getattr(self._stub, method)(request, timeout=seconds)


def _state_of(message: operations_pb2.RunState) -> RunState:
    """Returns the state in a reply, without control characters."""
    run, status, reason = map(printable, (message.run, message.status, message.reason))
    return RunState(run, status, reason, message.completed_rounds, printable(message.changes))


def _parts(call: Any) -> Iterator[operations_pb2.FilePart]:
    """Yields the parts of files; cancels the call if none comes for STALL_SECONDS."""
    while True:
        timer = threading.Timer(STALL_SECONDS, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            part = next(call, None)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                raise LinkError(
                    f"the server sent nothing for {STALL_SECONDS:g} s; see its log, and try again"
                ) from error
            raise
        finally:
            timer.cancel()
        if part is None:
            return
        yield part


def _join(pages: Iterable[operations_pb2.ReadResponse]) -> View:
    """Returns the view whose facts and rows come in pages. Raises LinkError if they are no view, or too large."""
    facts: TableRow = {}
    lists: dict[str, list[TableRow]] = {}
    size, values = 0, 0
    for page in pages:
        size += page.ByteSize()
        texts = [page.facts or "{}", *page.rows]
        values += sum(text.count(",") + text.count("[") + text.count("{") for text in texts)
        if size > MAX_READ_BYTES or values > MAX_READ_VALUES:
            limit = f"{MAX_READ_BYTES} bytes or {MAX_READ_VALUES} values"
            raise LinkError(f"the server sent more than {limit} for one view")
        facts |= json_row(texts[0])
        if page.list:
            lists.setdefault(page.list, []).extend(map(json_row, page.rows))
    return View(lists, facts)


def _is_token(text: str) -> bool:
    return re.fullmatch("[!-~]{1,10000}", text) is not None


@contextlib.contextmanager
def open_source(store: Path, server: str | None, identity: Path | None) -> Iterator[Source]:
    """Yields a source of runs: a server if one is given, else the store in a directory."""
    if server is None:
        yield LocalStore(store)
        return
    with connect(server, identity) as remote:
        yield remote


@contextlib.contextmanager
def connect(server: str, identity: Path | None) -> Iterator[OperatorClient]:
    """Opens a connection with the identity in a directory.

    Raises:
        ConfigurationError: `server` is not host:port, or `identity` is None, cannot be read or has expired.
        LinkError: The server cannot be reached, or the identity's CA did not sign its certificate.
        RefusedError: The holder of the identity may not make the call.
    """
    if identity is None:
        raise ConfigurationError("--server requires --identity DIR, a directory created by `fleetdistill pki issue`")
    if not re.fullmatch(r".+:\d{1,5}", server):
        raise ConfigurationError(f"--server is {server!r}, expected host:port, such as localhost:50051")
    credentials = load_credentials(identity)
    _check_expiry(credentials, identity)
    with grpc.secure_channel(server, credentials.channel(), _OPTIONS) as channel:
        yield OperatorClient(server, operations_pb2_grpc.OperationsServiceStub(channel), identity)


def _check_expiry(credentials: Credentials, identity: Path) -> None:
    """Raises ConfigurationError for an expired certificate, with which a server ends the handshake without a reason."""
    holder = holder_of(credentials.chain)
    if holder is not None and holder.expires_at <= time.time():
        raise ConfigurationError(
            f"your certificate in {identity} expired at {when(holder.expires_at)}; ask for a new one with "
            f"`fleetdistill pki issue --role {holder.role} --name {holder.name} --out DIR`"
        )


def _row(message: Any) -> TableRow:
    """Converts a message to a row; absent fields become None."""
    fields = message.DESCRIPTOR.fields
    return {
        field.name: None if field.has_presence and not message.HasField(field.name) else getattr(message, field.name)
        for field in fields
    }


def receive_model(parts: Iterable[operations_pb2.FilePart], out: Path) -> tuple[int, float]:
    """Writes a received model; returns its size in bytes and the largest difference to PyTorch's outputs.

    Raises:
        LinkError: The server sent something else than one complete model.
        StoreError: The file cannot be written.
    """
    with _receiving(parts, out, MAX_MODEL_BYTES) as (folder, report), disk_errors(f"writing {out}"):
        size = (folder / "model.onnx").stat().st_size if (folder / "model.onnx").exists() else -1
        if size != report.get("bytes"):
            raise LinkError(f"the server sent {max(size, 0)} of {report.get('bytes')} bytes of the model; try again")
        difference = float(report["max_difference"])
        if not 0 <= difference < math.inf:
            raise LinkError(f"the server reports the difference {difference} to PyTorch's outputs, must be at least 0")
        _check_onnx((folder / "model.onnx").read_bytes())
        rename_durably(folder / "model.onnx", out)
    return size, difference


def _check_onnx(data: bytes) -> None:
    try:
        check_self_contained(data, standard=False)
    except ModelError as error:
        raise LinkError(f"the model that the server sent {error}") from error


def receive_backup(parts: Iterable[operations_pb2.FilePart], out: Path) -> BackedUp:
    """Writes a received backup, after comparing every file with its digest in the manifest.

    A copy that was interrupted begins again: it is in `OUT.receiving` until it is complete, and deleted after an error.

    Raises:
        ConfigurationError: `out` is not empty.
        LinkError: The server sent other files than those of a backup.
        StoreError: A file is damaged or cannot be written.
    """
    check_empty(out)
    with _receiving(parts, out) as (folder, report):
        lost = [printable(str(item)) for item in list(report.get("lost", []))]
        missing = max(int(report.get("lost_in_all", 0)), len(lost))
        result = BackedUp(int(report.get("payloads", 0)), int(report.get("bytes", 0)), lost, missing)
        check_backup(folder / "backup")
        with disk_errors(f"writing {out}"):
            if out.exists():
                out.rmdir()
            keep_private(folder / "backup")  # the folder around it is private
            (folder / "backup").replace(out)
            sync_directory(out.parent)
    return result


@contextmanager
def _receiving(
    parts: Iterable[operations_pb2.FilePart], out: Path, most: float = math.inf
) -> Iterator[tuple[Path, TableRow]]:
    """Yields a new folder beside `out` with the files, durably written, and the report on them; then deletes it."""
    folder = out.with_name(out.name + ".receiving")
    try:
        report = _receive_all(parts, folder, most)
        yield folder, report
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LinkError(f"the server's report on the files is not valid: {in_words(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _receive_all(parts: Iterable[operations_pb2.FilePart], folder: Path, most: float) -> TableRow:
    with disk_errors(f"receiving into {folder}"), ExitStack() as opened:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt
        make_directory(folder)
        file: IO[bytes] | None = None
        size = 0
        for part in parts:
            if part.report:
                if file is not None:
                    sync_file(file)
                return json_row(part.report)
            if part.path:
                if file is not None:
                    sync_file(file)
                    file.close()
                file = opened.enter_context(_new_file(folder, part.path))
            size += len(part.data)
            if size > most:
                raise LinkError(f"the server sent more than {most} bytes, which no model has")
            if file is None:
                break
            file.write(part.data)
    raise LinkError("the server's files ended early; run the command again, it begins anew")


def json_row(text: str) -> TableRow:
    """Parses a JSON object of a server. Raises LinkError if the text is none, or is nested too deeply."""
    try:
        result = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"the server sent text that is not valid JSON: {in_words(error)}") from error
    if not isinstance(result, dict):
        raise LinkError(f"the server sent {type(result).__name__} in JSON, expected an object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _new_file(folder: Path, name: str) -> IO[bytes]:
    if not _NAMES.fullmatch(name):
        raise LinkError(f"the server sent a file named {name[:100]!r}, which is not part of a backup or a model")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb")
