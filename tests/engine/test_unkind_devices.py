"""No device ends a run: one of three does its worst in every round, over real gRPC, and the run completes.

The front is a process, the engine runs here over the same store. Two devices answer; the third does another thing in
each round, and answers in the round after it, or it would soon be left out for being late in several rounds in a row.
The test's only help is its clock: it lets the deadline of an ask pass that the third will never answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.answering import AnsweringDevice, AnsweringFleet
from support.fleets import assert_no_upload_lost
from support.live_front import live_front
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.framing import frame
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.service.wakeups import Ends, Wakeups, make_ends
from fleetdistill_server.store.store import Store

RUN = "unkind"
THIRD = "third"
ROWS = 5000
"""Of the third device's answers, so that they have several chunks."""


class ThirdDevice(AnsweringDevice):
    """Does what its round's behaviour says in place of an answer."""

    def __init__(self, port: int, store: Store) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.link = GrpcLink(f"127.0.0.1:{port}")
        super().__init__(self.link, RUN, THIRD, ROWS)
        self._store = store
        self.met: dict[str, int] = {}

    def _answer(self, ask: service_pb2.Ask) -> None:
        number, answers = divmod(ask.round - 1, 2)
        if answers:
            super()._answer(ask)
            return
        name, act = list(BEHAVIOURS.items())[number]
        self.met[name] = ask.round
        with contextlib.suppress(LinkError, RefusedError, grpc.RpcError):
            act(self, ask)
        if self.is_open(ask):  # nobody will answer it: its time is up
            where = (RUN, ask.round, ask.step_number, THIRD)
            self._store.database.write(
                "UPDATE asks SET deadline_at = 0 WHERE (run, round, step_number, device) = (?, ?, ?, ?)", *where
            )
            wait_until(lambda: not self.is_open(ask), "the deadline")

    def is_open(self, ask: service_pb2.Ask) -> bool:
        row = self._store.asks.get(RUN, ask.round, ask.step_number, THIRD)
        return row is not None and row.status == "open"

    def name(self, ask: service_pb2.Ask, attempt: int = 1) -> service_pb2.UploadName:
        return service_pb2.UploadName(round=ask.round, step_number=ask.step_number, attempt=attempt)

    def send(self, ask: service_pb2.Ask, answer: Payload, attempt: int = 1, **header: Any) -> service_pb2.Receipt:
        """A whole upload, with changes to its header."""
        settings = {
            "identity": self.identity,
            "name": self.name(ask, attempt),
            "payload": answer.header(),
            "samples": 4,
        }
        chunks = wire.chunks(answer.source, answer.slots)
        return self.link.upload(service_pb2.UploadHeader(**{**settings, **header}), chunks)

    def raw(self, messages: Iterator[bytes]) -> None:
        """Any bytes as an upload."""
        self.channel.stream_unary("/fleetdistill.wire.v1.DeviceService/Upload")(messages, timeout=PATIENCE_SECONDS)

    def good(self, ask: service_pb2.Ask) -> Payload:
        return self._knowledge(ask.seed)


def keeps_silent_and_holds_its_lease(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    for _ in range(3):
        device.link.heartbeat(device.identity)


def declines(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    request = service_pb2.DeclineRequest(identity=device.identity, round=ask.round, step_number=1, reason="\0" * 5000)
    device.link.decline(request)


def leaves_and_comes_back_as_the_same(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    device.link.leave(device.identity)
    device.contract = None  # its next step checks in again


def dies_in_its_upload(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    payload = device.good(ask)
    header = service_pb2.UploadHeader(
        identity=device.identity, name=device.name(ask), payload=payload.header(), samples=ROWS
    )
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield service_pb2.UploadRequest(header=header).SerializeToString()
        first = next(wire.chunks(payload.source, payload.slots))
        yield frame(first)
        over.wait(PATIENCE_SECONDS)

    call = device.channel.stream_unary("/fleetdistill.wire.v1.DeviceService/Upload").future(
        messages(), timeout=PATIENCE_SECONDS
    )
    wait_until(lambda: device.link.upload_status(device.identity, device.name(ask)).next_byte, "a staged byte")
    call.cancel()
    over.set()


def sends_garbage(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    for garbage in (b"\xff" * 100, b"", b"\x0a\x7f", bytes(range(256)) * 100):
        with contextlib.suppress(grpc.RpcError):
            device.raw(iter([garbage]))


def sends_chunks_without_a_header(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    chunk = knowledge_pb2.Chunk(data=b"abc")
    device.raw(iter([service_pb2.UploadRequest(chunk=chunk).SerializeToString()] * 3))


def sends_half_of_it(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    payload = device.good(ask)
    half = replace(payload, slots=payload.slots[:1])
    header = service_pb2.UploadHeader(
        identity=device.identity, name=device.name(ask), payload=payload.header(), samples=ROWS
    )
    device.link.upload(header, wire.chunks(half.source, half.slots))


def sends_other_bytes_than_it_says(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    for _ in range(3):
        with contextlib.suppress(RefusedError):
            device.send(ask, replace(device.good(ask), sha256=b"5" * 32))


def sends_what_is_not_finite(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    payload = device.good(ask)
    device.send(ask, replace(payload, source=_Ones()))


class _Ones:
    """All bits set: NaN in every float, -1 in every integer."""

    def read(self, start: int, size: int) -> bytes:
        return b"\xff" * size


def sends_a_wrong_shape(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    header = device.good(ask).header()
    header.parts.parts[0].sample_knowledge.logits.shape[0] = 1 << 40
    device.send(ask, device.good(ask), payload=header)


def says_it_has_no_samples(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    device.send(ask, device.good(ask), samples=0)


def dies_after_its_receipt_and_sends_it_all_again(device: ThirdDevice, ask: service_pb2.Ask) -> None:
    first = device.send(ask, device.good(ask))
    assert device.send(ask, device.good(ask)).id == device.send(ask, device.good(ask), attempt=9).id == first.id


BEHAVIOURS: dict[str, Callable[[ThirdDevice, service_pb2.Ask], None]] = {
    act.__name__: act
    for act in (
        keeps_silent_and_holds_its_lease,
        declines,
        leaves_and_comes_back_as_the_same,
        dies_in_its_upload,
        sends_garbage,
        sends_chunks_without_a_header,
        sends_half_of_it,
        sends_other_bytes_than_it_says,
        sends_what_is_not_finite,
        sends_a_wrong_shape,
        says_it_has_no_samples,
        dies_after_its_receipt_and_sends_it_all_again,
    )
}
REASONS = {
    "keeps_silent_and_holds_its_lease": "deadline passed",
    "declines": "declined",
    "leaves_and_comes_back_as_the_same": "device left",
    "dies_in_its_upload": "deadline passed",
    "sends_garbage": "deadline passed",
    "sends_chunks_without_a_header": "deadline passed",
    "sends_half_of_it": "deadline passed",
    "sends_other_bytes_than_it_says": "deadline passed",
    "sends_what_is_not_finite": "refused: ",
    "sends_a_wrong_shape": "refused: ",
    "says_it_has_no_samples": "refused: ",
    "dies_after_its_receipt_and_sends_it_all_again": None,
}
"""Why the third device is out of each round; None where its answer counts."""
ROUNDS = 2 * len(BEHAVIOURS)
"""After each behaviour, a round in which the third device answers."""


def config(rounds: int, **run: Any) -> RunConfig:
    return run_config(
        {
            "run": {
                "name": RUN,
                "method": "feddkc",
                "rounds": rounds,
                "min_devices": 3,
                "quorum": 0.5,
                "deadline_seconds": 600,
                **run,
            },
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": 1},
            "server": {"torch_device": "cpu"},
        }
    )


async def run_engine(store: Store, given: RunConfig, ends: Ends) -> None:
    await asyncio.wait_for(Engine(store, given, Wakeups(ends)).run(), 90)


@contextlib.contextmanager
def third_device(port: int, directory: Path) -> Iterator[ThirdDevice]:
    """The third device in a thread of its own until the end of the block."""
    over = threading.Event()
    device = ThirdDevice(port, Store.open(directory))

    def work() -> None:
        while not over.is_set() and not device.finished:
            try:
                device.step(0.5)
            except (LinkError, RefusedError):
                over.wait(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield device
    finally:
        over.set()
        thread.join()
        device.link.close()
        device.channel.close()
        device._store.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_completes_whatever_one_of_its_devices_does(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    front_ends, (engine_ends,) = make_ends()
    with (
        live_front(tmp_path / "store", ends=front_ends) as front,
        AnsweringFleet(front.port, RUN, 2),
        third_device(front.port, tmp_path / "store") as third,
    ):
        asyncio.run(run_engine(store, config(ROUNDS), engine_ends))
        assert front.process.poll() is None
    row = store.runs.get(RUN)
    assert row is not None
    assert (row.status, row.completed_rounds) == ("finished", ROUNDS)
    assert [item.status for item in store.runs.rounds(RUN)] == ["closed"] * ROUNDS
    assert third.met.keys() == BEHAVIOURS.keys(), "each of them was met"
    for name, number in third.met.items():
        ask = store.asks.get(RUN, number, 1, THIRD)
        assert ask is not None
        assert (ask.reason or "").startswith(REASONS[name] or ""), f"{name}: {ask.reason}"
        assert ask.status == ("answered" if REASONS[name] is None else "out"), name
    used = {(upload.round, upload.device) for upload in store.asks.uploads(RUN) if upload.status == "used"}
    honest = {(number, device) for number in range(1, ROUNDS + 1) for device in ("d0", "d1")}
    again = {(number, THIRD) for number in range(2, ROUNDS + 1, 2)}
    assert used == honest | again | {(third.met["dies_after_its_receipt_and_sends_it_all_again"], THIRD)}
    assert [event.device for event in store.history.events(RUN, "late")] == [THIRD] * 6
    assert store.history.events(RUN, "left-out") == []
    assert_no_upload_lost(store)
    store.close()


@pytest.mark.slow
def test_short_round_over_the_wire_is_closed_as_short(tmp_path: Path) -> None:
    """Two of three must answer and one does: its upload is reported with the reason, and the next round counts."""
    store = Store.open(tmp_path / "store")
    front_ends, (engine_ends,) = make_ends()

    def give_up_on_the_others() -> None:
        """The deadline passes for who has not answered in round 1."""
        wait_until(lambda: len(store.asks.uploads(RUN)) == 1, "the first answer")
        store.database.write("UPDATE asks SET deadline_at = 0 WHERE run = ? AND round = 1 AND status = 'open'", RUN)
        wait_until(lambda: len(store.history.events(RUN, "late")) == 2, "the deadline")
        clients[0].released = clients[1].released = True

    with live_front(tmp_path / "store", ends=front_ends) as front, contextlib.ExitStack() as stack:
        clients = [Waiting(front.port, f"w{number}", released=number == 2) for number in range(3)]
        for client in clients:
            stack.enter_context(client)
        watcher = threading.Thread(target=give_up_on_the_others)
        watcher.start()
        asyncio.run(run_engine(store, config(1, quorum=0.6), engine_ends))
        watcher.join()
    first, *others = store.runs.rounds(RUN)
    reason = "step 'train': 1 device answered, the quorum is 2; out of the round: deadline passed (2)"
    assert (first.status, first.reason) == ("short", reason)
    assert [other.status for other in others] == ["closed"]
    (lost,) = [upload for upload in store.asks.uploads(RUN) if upload.round == 1]
    assert (lost.device, lost.status) == ("w2", "reported")
    assert lost.reason.startswith("round short: step 'train'")
    assert {event.device for event in store.history.events(RUN, "late")} == {"w0", "w1"}
    assert_no_upload_lost(store)
    store.close()


class Waiting:
    """An answering device that fetches its asks, and answers none before it is released. It holds its lease."""

    def __init__(self, port: int, name: str, released: bool) -> None:
        self._link = GrpcLink(f"127.0.0.1:{port}")
        self._device = AnsweringDevice(self._link, RUN, name)
        self.released = released
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._over.is_set() and not self._device.finished:
            try:
                if self.released or self._device.contract is None:
                    self._device.step(0.2)
                else:
                    self._link.heartbeat(self._device.identity)
                    self._over.wait(0.1)
            except (LinkError, RefusedError):
                self._over.wait(0.1)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._link.close()
