"""The gRPC service for operators and viewers, with the command line's views as messages.

`security/roles.py` defines who may call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from fleetdistill.errors import ConfigurationError, FleetDistillError, RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2, operations_pb2_grpc
from fleetdistill_server.front import operator_jobs
from fleetdistill_server.front.errors import abort, in_pool
from fleetdistill_server.front.guard import holder_in
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.operator_log import OperatorLog
from fleetdistill_server.security.certificates import Holder
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import (
    Revoked,
    check_known_device,
    check_known_person,
    has_person,
    revoke_device,
    revoke_person,
)
from fleetdistill_server.security.tokens import create_tokens, token_bytes
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.service.wakeups import POLL_SECONDS
from fleetdistill_server.store.operator_calls import Call, Outcome
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted, readable_bytes, to_json
from fleetdistill_server.views.reading import FOR_OPERATORS, MAX_EVENTS, VIEWS, Query, ViewReader, read
from fleetdistill_server.views.results import backed_up, deleted, rolled_back
from fleetdistill_server.views.runs import TableRow, View
from fleetdistill_server.views.watch import changes, is_over

T = TypeVar("T", bound=Message)
MakeFiles = Callable[[Path], tuple[list[Path], str]]
"""Writes files into a folder; returns them and a report."""
MAX_CHANGES = 1000
"""Largest number of changes in one response to a call that watches a run."""
PAGE_BYTES = 1 << 20
"""Largest size of one list with texts in a response; callers accept 4 MiB in total."""
_FRAME_BYTES = 6  # overhead of a message in a list
_MAX_REASON = 512
_LONG_FIELDS = ("run_toml",)
"""Fields of requests that are not stored: they are long, and the store has their content elsewhere."""
_OPERATIONS = "/fleetdistill.wire.v1.OperationsService/"
_CHANGES: dict[str, type[Any]] = {
    "run": operations_pb2.RunProgress,
    "round": operations_pb2.RoundProgress,
    "step": operations_pb2.StepProgress,
    "event": operations_pb2.EventProgress,
}


class OperationsService(operations_pb2_grpc.OperationsServiceServicer):
    """Implements the calls of operators and viewers."""

    def __init__(
        self,
        api: DeviceApi,
        log: OperatorLog,
        directory: Path,
        pool: ThreadPoolExecutor,
        pki: Path,
        enrol_port: int,
        data_directories: Sequence[str],
    ) -> None:
        self._store, self._log = api.store, log
        self._copying = asyncio.Lock()
        self._copies = ThreadPoolExecutor(1)  # a backup verifies all payloads, which can take minutes
        operator_jobs.delete_remains(directory)
        self._directory = directory
        self._pool = pool
        self._pki = pki
        self._enrol_port = enrol_port
        self._data_directories = list(data_directories)
        self._creations = ThreadPoolExecutor(1)  # one at a time: each loads torch, and can take minutes

    async def WatchRun(
        self, request: operations_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[operations_pb2.WatchRunResponse]:
        seen: dict[str, TableRow] = {}
        while True:
            new = await in_pool(self._pool, context, partial(self._changes, request.run, seen))
            for page in pages(map(_change, new), PAGE_BYTES, MAX_CHANGES):
                yield operations_pb2.WatchRunResponse(changes=page)
            if is_over(new):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def Read(
        self, request: operations_pb2.ReadRequest, context: Any
    ) -> AsyncIterator[operations_pb2.ReadResponse]:
        holder = holder_in(context)
        caller = {} if holder is None else {"role": str(holder.role), "name": holder.name}
        result = await in_pool(self._pool, context, partial(self._read, request, VIEWS))
        parts = parts_of(View(result.lists, {**result.facts, **caller}) if request.view == "about" else result)
        while (part := await in_pool(self._pool, context, partial(next, parts, None))) is not None:
            yield part

    async def ReadForOperators(
        self, request: operations_pb2.ReadRequest, context: Any
    ) -> AsyncIterator[operations_pb2.ReadResponse]:
        parts = parts_of(await in_pool(self._pool, context, partial(self._read, request, FOR_OPERATORS)))
        while (part := await in_pool(self._pool, context, partial(next, parts, None))) is not None:
            yield part

    async def RevokePerson(
        self, request: operations_pb2.RevokePersonRequest, context: Any
    ) -> operations_pb2.RevokePersonResponse:
        call = call_of(context, "RevokePerson", request)
        revoke = partial(_revoke_person, request, holder_in(context), self._pki)
        changed = await in_pool(self._pool, context, partial(self._log.commit, call, revoke, Outcome))
        known = has_person(self._pki, request.role, request.name)
        return operations_pb2.RevokePersonResponse(changed=changed, known=known)

    async def RevokeDevice(
        self, request: operations_pb2.RevokeDeviceRequest, context: Any
    ) -> operations_pb2.RevokeDeviceResponse:
        call = call_of(context, "RevokeDevice", request)
        return await in_pool(self._pool, context, partial(self._revoke, request, call))

    async def ForgetDevice(
        self, request: operations_pb2.ForgetDeviceRequest, context: Any
    ) -> operations_pb2.ForgetDeviceResponse:
        call = call_of(context, "ForgetDevice", request)
        forget = partial(operator_jobs.forget, run=request.run, device=request.device)
        work = partial(self._log.commit, call, forget, lambda done: Outcome(not done))
        return operations_pb2.ForgetDeviceResponse(forgotten=await in_pool(self._pool, context, work))

    async def CreateTokens(
        self, request: operations_pb2.CreateTokensRequest, context: Any
    ) -> operations_pb2.CreateTokensResponse:
        call = call_of(context, "CreateTokens", request)
        return await in_pool(self._pool, context, partial(self._create, request, call))

    async def ExportModel(
        self, request: operations_pb2.ExportModelRequest, context: Any
    ) -> AsyncIterator[operations_pb2.FilePart]:
        with _ending() as ended:
            make = partial(operator_jobs.make_export, self._directory, request.run, ended)
            files = self._files(context, call_of(context, "ExportModel", request), make)
            async with contextlib.aclosing(files) as parts:
                async for part in parts:
                    yield part

    async def BackUp(
        self, request: operations_pb2.BackUpRequest, context: Any
    ) -> AsyncIterator[operations_pb2.FilePart]:
        make = partial(operator_jobs.make_backup, self._directory)
        async with contextlib.aclosing(self._files(context, call_of(context, "BackUp", request), make)) as parts:
            async for part in parts:
                yield part

    async def _files(self, context: Any, call: Call, make: MakeFiles) -> AsyncGenerator[operations_pb2.FilePart, None]:
        """Streams files that `make` writes into a folder."""
        if self._copying.locked():
            text = "another backup or export is in progress; try again when it has ended"
            await abort(context, RefusedError(Code.NOT_READY, text))
        with contextlib.ExitStack() as ends:
            async with self._copying:  # not while the caller reads, who may take its time
                folder = await in_pool(
                    self._copies, context, lambda: ends.enter_context(operator_jobs.folder_in(self._directory))
                )
                work = partial(self._log.around, call, partial(make, folder), _copy)
                made = await in_pool(self._copies, context, work)
            parts = operator_jobs.parts_of_files(folder, *made)
            while (part := await in_pool(self._copies, context, partial(next, parts, None))) is not None:
                yield part

    async def CreateRun(
        self, request: operations_pb2.CreateRunRequest, context: Any
    ) -> operations_pb2.CreateRunResponse:
        call = call_of(context, "CreateRun", request)
        with _ending() as ended:  # a process of its own stores the call with the run, and ends with the call
            create = partial(operator_jobs.create, self._directory, self._data_directories, request, call, ended)
            work = partial(self._log.unless_failed, call, create)
            state = await in_pool(self._creations, context, work)
        return operations_pb2.CreateRunResponse(run=_message_of(state))

    async def ChangeRun(
        self, request: operations_pb2.ChangeRunRequest, context: Any
    ) -> operations_pb2.ChangeRunResponse:
        call = call_of(context, "ChangeRun", request)
        change = partial(operator_jobs.change, request=request, who=call.who)
        work = partial(self._log.commit, call, change, lambda state: Outcome(text=state.sentence))
        check = partial(operator_jobs.check_checkpoint, self._store, request)
        await in_pool(self._pool, context, partial(self._log.unless_failed, call, check))
        return operations_pb2.ChangeRunResponse(run=_message_of(await in_pool(self._pool, context, work)))

    async def DeleteRun(
        self, request: operations_pb2.DeleteRunRequest, context: Any
    ) -> operations_pb2.DeleteRunResponse:
        call = call_of(context, "DeleteRun", request)
        delete = partial(operator_jobs.delete, self._directory, request.run)
        work = partial(self._log.around, call, delete, lambda gone: Outcome(text=deleted(request.run, gone)))
        check = partial(operator_jobs.check_deletable, self._store, request.run)
        await in_pool(self._pool, context, partial(self._log.unless_failed, call, check))
        gone = await in_pool(self._pool, context, work)
        if gone is None:
            return operations_pb2.DeleteRunResponse()
        numbers = operations_pb2.DeletedRun(
            rounds=gone.rounds,
            events=gone.events,
            figures=gone.figures,
            payloads=gone.freed.payloads,
            bytes=gone.freed.bytes,
            later_payloads=gone.later.payloads,
            later_bytes=gone.later.bytes,
        )
        return operations_pb2.DeleteRunResponse(deleted=numbers)

    async def RollBackRun(
        self, request: operations_pb2.RollBackRunRequest, context: Any
    ) -> operations_pb2.RollBackRunResponse:
        call = call_of(context, "RollBackRun", request)
        run, to = request.run, request.to
        roll_back = partial(operator_jobs.roll_back, self._directory, run, to, call.who)
        work = partial(self._log.around, call, roll_back, lambda done: Outcome(text=rolled_back(run, to, done)))
        done = await in_pool(self._pool, context, work)
        return operations_pb2.RollBackRunResponse(completed_rounds=done.completed_rounds, undone_rounds=done.undone)

    def _changes(self, run: str, seen: dict[str, TableRow]) -> list[TableRow]:
        with _unknown_run():
            return changes(self._store, self._directory, run, seen)

    def _read(self, request: operations_pb2.ReadRequest, views: Mapping[str, ViewReader]) -> View:
        if request.view not in views:
            raise RefusedError(Code.BAD_MESSAGE, f"there is no view {request.view[:64]!r}; upgrade the server")
        optional = {name: getattr(request, name) for name in ("round", "before") if request.HasField(name)}
        if not 1 <= request.most <= MAX_EVENTS:
            raise RefusedError(Code.BAD_MESSAGE, f"most is {request.most}, must be 1 to {MAX_EVENTS}")
        for name in ("round", "before"):
            if getattr(request, name) >= 1 << 63:
                raise RefusedError(Code.BAD_MESSAGE, f"{name} is {getattr(request, name)}, must be below 2**63")
        names = ("view", "run", "device", "after", "kind", "text", "most")
        query = Query(**{name: getattr(request, name) for name in names}, **optional)
        with _unknown_run():
            return read(self._store, self._directory, query)

    def _revoke(self, request: operations_pb2.RevokeDeviceRequest, call: Call) -> operations_pb2.RevokeDeviceResponse:
        if not request.confirmed:  # before the transaction, because a search among many ids takes seconds
            self._log.unless_failed(call, partial(_check_known_device, request, self._store))
        revoked = self._log.commit(call, partial(_revoke_device, request), lambda done: Outcome(done.changed))
        return operations_pb2.RevokeDeviceResponse(changed=revoked.changed, known=revoked.known)

    def _create(self, request: operations_pb2.CreateTokensRequest, call: Call) -> operations_pb2.CreateTokensResponse:
        authority = Authority(self._pki)
        fit = PAGE_BYTES * 3 // token_bytes(authority)
        wanted = max(request.count, len(request.devices))
        if wanted > fit:
            text = f"{wanted} tokens do not fit into one response; request at most {fit} at a time"
            raise RefusedError(Code.BAD_MESSAGE, text)
        arguments = (authority, self._enrol_port, request.count, request.expires_seconds, request.run, request.devices)

        def create(store: Store) -> list[str]:
            with _bad_message():
                return create_tokens(store, *arguments)

        made = self._log.commit(call, create, lambda tokens: Outcome(text=counted(len(tokens), "token")))
        return operations_pb2.CreateTokensResponse(tokens=made)


def call_of(context: Any, name: str, request: Any = None) -> Call:
    """Returns who makes a call of a method, from where, and with which request."""
    holder = holder_in(context)
    known = isinstance(request, Message)  # an undecodable request has no arguments
    fields = json.loads(MessageToJson(request, preserving_proto_field_name=True)) if known else {}
    arguments = _created_run(fields) | {field: value for field, value in fields.items() if field not in _LONG_FIELDS}
    role, who = ("unknown", "") if holder is None else (str(holder.role), holder.name)
    return Call(role, who, name, arguments, str(context.peer()))


def _created_run(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name of the run that a request creates; nothing for other requests, or if it cannot be read."""
    try:
        return {"run": str(tomllib.loads(fields["run_toml"])["run"]["name"])}
    except (KeyError, TypeError, ValueError, RecursionError):  # TOMLDecodeError, or a number of too many digits
        return {}


def store_refusals(log: OperatorLog, pool: ThreadPoolExecutor) -> Callable[[str, Any, FleetDistillError, Any], None]:
    """Returns a function for the guard that stores refused calls of operations without waiting."""

    def store_refusal(method: str, context: Any, refusal: FleetDistillError, request: Any) -> None:
        if method.startswith(_OPERATIONS):
            call = call_of(context, method.removeprefix(_OPERATIONS), request)
            asyncio.get_running_loop().run_in_executor(pool, partial(log.add_failed, call, refusal))

    return store_refusal


def _message_of(state: RunState) -> operations_pb2.RunState:
    return operations_pb2.RunState(**asdict(state))


def _copy(made: tuple[Sequence[Path], str]) -> Outcome:
    """Returns in words what a backup or an export has made."""
    report = json.loads(made[1])
    if "payloads" in report:
        return Outcome(text=backed_up(report["payloads"], report["bytes"], report["lost_in_all"]))
    return Outcome(text=readable_bytes(report["bytes"]))


@contextlib.contextmanager
def _ending() -> Iterator[threading.Event]:
    """Yields an event that is set at the end of the block, which may be the end of a cancelled call."""
    ended = threading.Event()
    try:
        yield ended
    finally:
        ended.set()


def parts_of(view: View) -> Iterator[operations_pb2.ReadResponse]:
    """Yields a view in messages of about a page."""
    yield operations_pb2.ReadResponse(facts=to_json(view.facts))
    for title, rows in view.lists.items():
        page, size = operations_pb2.ReadResponse(list=title), 0
        for row in rows:
            text = to_json(row)
            if page.rows and size + len(text) > PAGE_BYTES:
                yield page
                page, size = operations_pb2.ReadResponse(list=title), 0
            page.rows.append(text)
            size += len(text) + _FRAME_BYTES
        yield page


def pages(messages: Iterable[T], max_bytes: int, most: int = MAX_CHANGES) -> Iterator[list[T]]:
    """Yields the messages in lists of at most `most` messages and `max_bytes` bytes; a larger message is alone."""
    page: list[T] = []
    size = 0
    for message in messages:
        more = message.ByteSize() + _FRAME_BYTES
        if page and (size + more > max_bytes or len(page) == most):
            yield page
            page, size = [], 0
        page.append(message)
        size += more
    if page:
        yield page


def _check_known_device(request: operations_pb2.RevokeDeviceRequest, store: Store) -> None:
    with _bad_message():
        check_known_device(store, request.device)


def _revoke_device(request: operations_pb2.RevokeDeviceRequest, store: Store) -> Revoked:
    with _bad_message():
        return revoke_device(store, request.device, request.reason)


def _revoke_person(request: operations_pb2.RevokePersonRequest, caller: Holder | None, pki: Path, store: Store) -> bool:
    """Revokes a person. The caller stays an operator, unless it confirmed its own revocation."""
    if caller is not None and store.credentials.is_revoked(*caller.subjects):  # in the meantime, by another operator
        raise RefusedError(Code.REVOKED, f"{caller.role} {caller.name[:64]!r} was revoked; contact the operator")
    if caller is not None and (request.role, request.name) == (caller.role, caller.name) and not request.confirmed:
        text = f"operator {caller.name!r} would revoke itself and could not undo it"
        raise RefusedError(Code.BAD_MESSAGE, f"{text}; confirm it with --yes, or let another operator do it")
    with _bad_message():
        if not request.confirmed:
            check_known_person(store, pki, request.role, request.name, "the server's PKI")
        return revoke_person(store, request.role, request.name, request.reason)


def _fill(kind: type[Any], row: TableRow) -> Any:
    """Returns a message with the values of a row for which it has fields; None leaves a field unset."""
    fields = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: value for name, value in row.items() if name in fields and value is not None})


def _change(row: TableRow) -> operations_pb2.RunChange:
    """Returns one change as `fleetdistill runs watch` shows it."""
    kind = row["kind"]
    return operations_pb2.RunChange(**{kind: _fill(_CHANGES[kind], row)})


@contextlib.contextmanager
def _bad_message() -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise RefusedError(Code.BAD_MESSAGE, str(error)) from error


@contextlib.contextmanager
def _unknown_run() -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise RefusedError(Code.UNKNOWN_RUN, str(error)[:_MAX_REASON]) from error
