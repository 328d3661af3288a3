"""Hostile messages to a running front: every call of every service, as messages and as bytes that are none."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import grpc
from fuzz.hostile import hostile, mangled_bytes
from fuzz.in_process import DEVICE, RUN, upload_messages
from fuzz.specimens import contract_for, specimens
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.processes import PATIENCE_SECONDS, peak_memory
from support.secured import SecuredFront, device_credentials, make_pki, person_credentials, secured_front
from support.wire_samples import make_identity, make_profile

from fleetdistill.wire import v1
from fleetdistill.wire.codes import MEANINGS, Code
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

_SECONDS = PATIENCE_SECONDS
# gRPC's own, before our code is asked: a message over 4 MiB.
_OF_GRPC = {"RESOURCE_EXHAUSTED"}
# It goes on for as long as the run does, so the caller ends it.
_ENDLESS, _WATCH_SECONDS = "WatchRun", 0.3
Sent = tuple[MethodDescriptor, list[bytes]]


def methods() -> list[MethodDescriptor]:
    """Every call of every service in the protos."""
    folder = Path(v1.__path__[0])
    modules = [import_module(f"{v1.__name__}.{path.stem}") for path in sorted(folder.glob("*_pb2.py"))]
    services = [item for module in modules for item in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


class SocketTarget:
    """Everybody who may call something, with certificates that are in order, and nothing else that is.

    The device is checked in and asked for every kind of answer; who enrols is anonymous; an operator does the rest.

    Attributes:
        outcomes: How often each status, with our code where there was one.
        called: How often each method ended in each of them.
    """

    def __init__(self, front: SecuredFront, store: Store) -> None:
        authority = Authority(front.pki)
        self._front, self._store = front, store
        self._channel = front.channel(device_credentials(authority, DEVICE))
        self._channels = {
            "DeviceService": self._channel,
            "Enrol": front.anonymous(enrol=True),
            "Renew": self._channel,
            "OperationsService": front.channel(person_credentials(authority, Role.OPERATOR, "fuzz")),
        }
        self._methods = methods()
        self._specimens = specimens()
        self._names = sorted(self._specimens)
        self._identity = make_identity(DEVICE)
        self._check_in()
        self.outcomes: Counter[str] = Counter()
        self.called: dict[str, Counter[str]] = {method.name: Counter() for method in self._methods}

    def turn(self, random: Random) -> int:
        """Makes one call; returns the number of its messages."""
        method, messages = self._upload(random) if random.random() < 0.4 else self._any_call(random)
        self._call(method, messages)
        return len(messages)

    def reopen(self) -> None:
        """As if nobody had answered; now and then, so that uploads reach the checks of their data."""
        with self._store.transaction():
            self._store.database.write("DELETE FROM uploads")
            self._store.database.write("DELETE FROM revocations")  # the operator may have hit upon our device
            self._store.database.write("UPDATE asks SET status = 'open', reason = NULL")

    def assert_serves(self) -> None:
        """The same process still answers a well-behaved device, with a whole upload."""
        assert self._front.process.poll() is None, "the front has died"
        assert self._front.log is not None
        assert "Traceback" not in self._front.log.read_text(), f"a call broke, see {self._front.log}"
        self.reopen()
        self._check_in()
        stub: Any = service_pb2_grpc.DeviceServiceStub(self._channel)
        specimen = self._specimens["plan"]
        name = service_pb2.UploadName(round=1, step_number=self._names.index("plan") + 1, attempt=99)
        header = service_pb2.UploadHeader(
            identity=self._identity, name=name, payload=specimen.payload.header(), samples=1
        )
        assert stub.Upload(iter([service_pb2.UploadRequest(header=header)]), timeout=_SECONDS).receipt.id

    @property
    def peak_memory(self) -> int:
        """Most bytes that the front ever had in memory."""
        return peak_memory(self._front.process.pid)

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()

    def _check_in(self) -> None:
        stub: Any = service_pb2_grpc.DeviceServiceStub(self._channel)
        contract = stub.CheckIn(service_pb2.CheckInRequest(identity=self._identity), timeout=_SECONDS).contract
        profile = make_profile(features=contract.features, proxy_digest=contract.proxy_digest)
        request = service_pb2.CheckInRequest(identity=self._identity, profile=profile)
        self._identity.secret = stub.CheckIn(request, timeout=_SECONDS).secret or self._identity.secret

    def _any_call(self, random: Random) -> Sent:
        method = random.choice(self._methods)
        request = self._filled(method.input_type)
        messages = [_bytes(random, request) for _ in range(random.choice([1, 1, 1, 3]))]
        return method, messages if method.client_streaming else messages[:1]

    def _upload(self, random: Random) -> Sent:
        number = random.randrange(len(self._names))
        payload, chunks = upload_messages(random, self._specimens[self._names[number]])
        name = service_pb2.UploadName(round=1, step_number=number + 1, attempt=random.randrange(5))
        header = service_pb2.UploadHeader(identity=self._identity, name=name, payload=payload, samples=4)
        requests = [service_pb2.UploadRequest(header=header)]
        requests += [service_pb2.UploadRequest(chunk=chunk) for chunk in chunks[:20]]
        return _UPLOAD, [
            request.SerializeToString() if random.random() < 0.9 else _bytes(random, request) for request in requests
        ]

    def _filled(self, descriptor: Any) -> Message:
        """A request with something in every field, in this device's name."""
        request = GetMessageClass(descriptor)()
        _fill(request, depth=0)
        if "identity" in descriptor.fields_by_name:
            request.identity.CopyFrom(self._identity)  # type: ignore[attr-defined]
        if "wait_seconds" in descriptor.fields_by_name:
            request.wait_seconds = 0.0  # type: ignore[attr-defined]
        if descriptor.name in ("DeleteRunRequest", "RollBackRunRequest"):
            request.run = "another"  # type: ignore[attr-defined]  # every other call needs this one
        return request

    def _call(self, method: MethodDescriptor, messages: list[bytes]) -> None:
        service = method.containing_service
        channel = self._channels[method.name if method.name in self._channels else service.name]
        # This kind of call serves for every other, and needs no message class.
        call = channel.stream_stream(f"/{service.full_name}/{method.name}")
        outcome = "answered"
        try:
            for _ in call(iter(messages), timeout=_WATCH_SECONDS if method.name == _ENDLESS else _SECONDS):
                pass
        except grpc.RpcError as error:
            outcome = _said(error, method)
        self.outcomes[outcome] += 1
        self.called[method.name][outcome] += 1


_UPLOAD = service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods_by_name["Upload"]


def _bytes(random: Random, request: Message) -> bytes:
    if random.random() < 0.2:
        return mangled_bytes(random, request.SerializeToString())
    return hostile(random, request).SerializeToString() if random.random() < 0.9 else request.SerializeToString()


def _fill(message: Any, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            value: Any = b"\x01" * 32 if field.type == FieldDescriptor.TYPE_BYTES else 1
            value = RUN if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and value == 1 else value
            getattr(message, field.name).append(value) if field.is_repeated else setattr(message, field.name, value)
        elif depth < 4:
            inner = getattr(message, field.name)
            _fill(inner.add() if field.is_repeated else inner, depth + 1)


def _said(error: Any, method: MethodDescriptor) -> str:
    """The status and our code; fails for anything that docs/reference/errors.md does not name."""
    status = str(error.code().name)
    if method.name == _ENDLESS and status == "DEADLINE_EXCEEDED":
        return "answered"
    result = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if result is None or not result.details or not result.details[0].Unpack(info):
        assert status in _OF_GRPC, f"{status} without a code of ours: {error.details()}"
        return f"{status} of gRPC"
    assert status == MEANINGS[Code(info.reason)].status
    assert info.reason != Code.INTERNAL, error.details()
    return f"{status} {info.reason}"


@contextlib.contextmanager
def socket_target(directory: Path) -> Iterator[SocketTarget]:
    """A front over a store of its own, until the end of the block."""
    all_of_them = specimens()
    store = Store.open(directory / "store")
    make_pki(directory / "pki")
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, contract_for(all_of_them).SerializeToString())
    store.runs.start_round(RUN, [DEVICE])
    with secured_front(directory / "store", directory / "pki", log=directory / "front.log") as front:
        target = SocketTarget(front, store)
        common: dict[str, Any] = {
            "run": RUN,
            "round": 1,
            "device": DEVICE,
            "payload": None,
            "payload_bytes": 0,
            "seed": 1,
        }
        store.asks.add(
            [
                Ask(
                    **common,
                    step_number=number,
                    step=name,
                    expects=all_of_them[name].expects,
                    deadline_at=time.time() + 86_400,
                )
                for number, name in enumerate(sorted(all_of_them), 1)
            ]
        )
        try:
            yield target
        finally:
            target.close()
            store.close()
