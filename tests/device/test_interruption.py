"""Work that must end now ends between two mini-batches or chunks, and is done again later with the same result."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from support.hostile_server import LyingLink, ask, device_at, terms
from support.long import long_except
from support.processes import PATIENCE_SECONDS

from fleetdistill import Event, Step
from fleetdistill.errors import LinkError, WorkInterrupted
from fleetdistill.interruption import Hold, bound_check, check_may_continue, check_with, pause
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.testing import EventLog
from fleetdistill.wire.v1 import service_pb2

ENDLESS = {"local_epochs": 10**12}


def held() -> None:
    raise Hold("charging", "the device is not charging").error()


def test_checks_apply_in_their_block_and_threads_that_take_them() -> None:
    result: list[str] = []

    def in_thread(check: Any) -> None:
        try:
            check()
        except WorkInterrupted as error:
            result.append(error.condition)

    with check_with(lambda: None), check_with(held):
        for check in (check_may_continue, bound_check()):
            thread = threading.Thread(target=in_thread, args=(check,))
            thread.start()
            thread.join(PATIENCE_SECONDS)
        with pytest.raises(WorkInterrupted, match="not charging"):
            pause(PATIENCE_SECONDS)
    check_may_continue()
    assert result == ["charging"]


def stopped_while(link: Any, state_dir: Path, at: str) -> Any:
    """Runs a device in a thread, and stops it once an event of this kind was emitted."""
    reached, events = threading.Event(), EventLog()

    def on_event(event: Event) -> None:
        events.append(event)
        if event.kind == at:
            reached.set()

    device, _ = device_at(link, state_dir, on_event=on_event)
    with device:
        running = threading.Thread(target=device.run)
        running.start()
        assert reached.wait(PATIENCE_SECONDS)
        device.stop()
        running.join(PATIENCE_SECONDS)
        assert not running.is_alive()
        device.stop()
        assert device.step() is Step.PAUSED, "also if the stop came before the step"
    return events


def answer_to(link: LyingLink, state_dir: Path) -> bytes:
    device, _ = device_at(link, state_dir)
    with device:
        device.run()
    (header,) = link.uploads
    sha256: bytes = header.payload.sha256
    return sha256


def test_stop_ends_endless_training_and_ask_gets_same_answer(tmp_path: Path) -> None:
    link = LyingLink(ask(), terms=terms(settings=ENDLESS))
    stopped_while(link, tmp_path / "a", "ask")
    assert not link.declined
    assert not link.uploads
    assert not link.left, "leaving would close the ask"
    again = LyingLink(ask(), terms=terms())
    assert answer_to(again, tmp_path / "a") == answer_to(LyingLink(ask()), tmp_path / "b")
    assert again.uploads[0].name.attempt == 1
    assert again.left == 1


@pytest.mark.parametrize("call", ["check_in", "download", "upload_status", "upload"])
def test_stop_ends_a_call_and_the_work_is_done_later(tmp_path: Path, call: str) -> None:
    link = LyingLink(ask())
    honest = getattr(link, call)

    def stopping(*given: Any) -> Any:
        device.stop()
        return honest(*given)

    setattr(link, call, stopping)
    device, events = device_at(link, tmp_path)
    with device:
        device.run()
    assert not link.uploads
    assert not {"lost-contact", "dropped"} & {event.kind for event in events}
    again = LyingLink() if call.startswith("upload") else LyingLink(ask())  # an answer in the outbox needs no ask
    assert answer_to(again, tmp_path) == answer_to(LyingLink(ask()), tmp_path / "other")


@pytest.mark.parametrize(
    "call", long_except(["check_in", "next_ask", "upload_status", "upload", "download"], "next_ask")
)
def test_interrupt_cancels_every_call_to_a_silent_server(call: str) -> None:
    identity = service_pb2.Identity(run="r", device="d")
    given: dict[str, tuple[Any, ...]] = {
        "check_in": (identity, None),
        "next_ask": (identity, 60.0),
        "upload_status": (identity, service_pb2.UploadName()),
        "upload": (service_pb2.UploadHeader(identity=identity), iter([])),
        "download": (identity, bytes(32), 0),
    }
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.01):
            link.interrupt()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = GrpcLink(f"127.0.0.1:{silent.getsockname()[1]}")
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(LinkError, match=r"cancelled|CANCELLED"):
                getattr(link, call)(*given[call])
        finally:
            ended.set()
            interrupting.join(PATIENCE_SECONDS)
            link.close()
