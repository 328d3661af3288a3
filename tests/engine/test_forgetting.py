"""Forgetting a device: nothing of its part is left in the store, whoever dies, works or comes back meanwhile.

One run on the disk, halted after its first round, is made once; each test has a copy of it. A device's part is what it
has sent, and the space of the merge with it, which the other devices were sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, Prepared, outcome, prepare, run_in_memory
from support.forked import ForkedEngine, forked_forget_command
from support.live_front import RUN as MADE_RUN
from support.live_front import open_round, prepare_store, upload_name, write_asks
from support.long import long_except
from support.processes import wait_until
from support.sqlite import tables_of
from support.wire_samples import in_pieces, make_identity, make_payload, make_profile

from fleetdistill.errors import ConfigurationError, RefusedError, RunError
from fleetdistill.knowledge import ClassSpace, SharedStatistics
from fleetdistill.state import failpoints
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.engine import forgetting
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.front.server import open_api
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.intake.uploads import UploadSession
from fleetdistill_server.methods.base import Notes  # type: ignore[attr-defined]
from fleetdistill_server.methods.classstats.server import ClassStatsServer
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.store import retention
from fleetdistill_server.store.records import Ask, ReportedFigure
from fleetdistill_server.store.retention import sweep_all
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

NAMED_LATER = (
    "disk.before-rename",  # what is staged of a state or a payload
    "blob.before-commit",
    "blob.after-commit",
    "engine.asks.before-commit",
    "engine.checkpoint.after-write",
)
"""Where something is on the disk that no row names yet."""
KILLS = ("forget.after-state", "forget.before-note")


class Halt(BaseException):
    """Ends an engine between two rounds."""


@dataclass
class Halted:
    """A run on the disk whose engine has ended between two rounds.

    Attributes:
        device: One of three.
        part: What its means and the space look like, wherever they are kept.
    """

    prepared: Prepared
    directory: Path
    device: str
    part: list[bytes]

    def open(self) -> Store:
        return Store.open(self.directory)

    def files_with_the_part(self) -> list[Path]:
        """The database and its log among them."""
        files = [file for file in sorted(self.directory.rglob("*")) if file.is_file()]
        return [file for file in files if any(item in file.read_bytes() for item in self.part)]

    def engine(self, store: Store, waker: Any = None) -> Engine:
        return Engine(store, self.prepared[0], waker or DriveDevices([], lambda: None))

    def parts(self, store: Store) -> list[str]:
        """Whose parts the run's state has."""
        row = store.runs.get(RUN)
        assert row is not None
        return sorted(unpack_state(store.blobs.get_state(row.checkpoint))["parts"])

    def others(self) -> list[str]:
        return [spec.name for spec in self.prepared[1] if spec.name != self.device]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Halted:
    directory = tmp_path_factory.mktemp("made")
    wanted = replace(RUNS["classstats"], devices=3, rounds=3, train_limit=300, alpha=10.0)
    prepared = _on_disk(prepare(wanted, directory / "work"), directory / "store")
    with ExitStack() as stack:
        store = Store.open(directory / "store")
        stack.callback(store.close)
        api = DeviceApi(store)
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in prepared[1]]
        run = prepared[0].run.model_copy(update={"min_devices": 3})
        config = prepared[0].model_copy(update={"run": run})
        engine = Engine(store, config, DriveDevices(devices, lambda: None))
        engine._close = _then_halt(engine._close, after=1)  # type: ignore[method-assign, assignment]
        with pytest.raises(Halt):
            asyncio.run(engine.run())
        device = prepared[1][0].name
        return Halted(prepared, directory / "store", device, _part_of(device, store))


def _on_disk(prepared: Prepared, store: Path) -> Prepared:
    config, specs, work = prepared
    terms = config.run.model_copy(update={"min_devices": 2})  # those that are left are enough
    server = config.server.model_copy(update={"store": str(store)})
    return config.model_copy(update={"run": terms, "server": server}), specs, work


def _then_halt(close: Callable[[Any], None], after: int) -> Callable[[Any], None]:
    def closing(cohort: Any) -> None:
        close(cohort)
        if cohort.round == after:
            raise Halt

    return closing


def _part_of(device: str, store: Store) -> list[bytes]:
    """The means that a device has sent, and the directions of the space."""
    result = []
    for row in store.asks.uploads(RUN):
        if (row.step, row.device) == ("summarise", device):
            sent = decode(store.blobs.open(row.sha256))["statistics"]
            assert isinstance(sent, SharedStatistics)
            assert sent.means is not None
            result.append(sent.means.tobytes())
    for ask in store.asks.of_step(RUN, 1, 2):
        space = decode(store.blobs.open(ask.payload))["space"]
        assert isinstance(space, ClassSpace)
        result.append(space.directions.tobytes())
    assert len(set(result)) == 2
    return result


@pytest.fixture
def run(made: Halted, tmp_path: Path) -> Halted:
    shutil.copytree(made.directory, tmp_path / "store")
    config, specs, _ = made.prepared
    (tmp_path / "work").mkdir()
    return replace(
        made, directory=tmp_path / "store", prepared=_on_disk((config, specs, tmp_path / "work"), tmp_path / "store")
    )


@pytest.fixture
def store(run: Halted) -> Iterator[Store]:
    opened = run.open()
    yield opened
    opened.close()


def told_with_the_part(run: Halted, store: Store) -> list[Ask]:
    """Asks of other devices whose payload has the forgotten device's part in it."""
    asks = [ask for ask in store.asks.of_step(RUN, 1, 2) if ask.payload]
    result = {file.stem for file in run.files_with_the_part()}
    return [ask for ask in asks if ask.device != run.device and ask.payload.hex() in result]


def assert_forgotten(run: Halted, store: Store) -> None:
    assert run.files_with_the_part() == []
    assert run.parts(store) == run.others()
    assert store.devices.to_forget(RUN) == []
    assert [row.device for row in store.history.events(RUN, "forgotten")] == [run.device]


def assert_still_to_forget(run: Halted, store: Store) -> None:
    assert run.files_with_the_part()
    assert store.devices.to_forget(RUN) == [run.device]
    forgotten = {device.id: device.forgotten_at for device in store.devices.all(RUN)}
    assert forgotten[run.device] is None
    assert store.history.events(RUN, "forgotten") == []


# --- where the part may be


def test_nothing_is_left_of_what_a_forgotten_device_sent(run: Halted, store: Store) -> None:
    """Nor of the space that the other devices were sent."""
    assert run.device in run.parts(store)
    assert {ask.device for ask in told_with_the_part(run, store)} == set(run.others())
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert_forgotten(run, store)


def test_forgetting_clears_quarantine_broken_uploads_and_writes(run: Halted, store: Store) -> None:
    sent = next(row for row in store.asks.uploads(RUN) if row.device == run.device and row.step == "summarise")
    lost = [sent.sha256, told_with_the_part(run, store)[0].payload]
    for sha256 in lost:
        store.blobs.quarantine(sha256)
    store.blobs.put(make_payload())
    store.blobs.quarantine(make_payload().sha256)
    staging = run.directory / "blobs" / "staging"
    for name in (f"ask-{sent.ask}-attempt-2", f"put-{'ab' * 32}-1", "state-1"):
        (staging / f"{name}.part").write_bytes(b"torn" + run.part[0])
    (run.directory / "blobs" / "00").mkdir(exist_ok=True)
    (run.directory / "blobs" / "00" / f"{'00' * 32}.safetensors").write_bytes(run.part[0])  # an upload without a row
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert_forgotten(run, store)
    assert list(staging.iterdir()) == []
    (other,) = (run.directory / "blobs" / "quarantine").iterdir()
    assert other.name.startswith(make_payload().sha256.hex()), "damage of others stays to be looked at"


def test_figures_by_class_go_and_the_others_stay(run: Halted, store: Store) -> None:
    def figures() -> list[ReportedFigure]:
        return [row for row in store.history.figures(RUN, "accuracy", "test") if row.device == run.device]

    store.database.write("UPDATE figures SET by_class = ?", json.dumps({"3": [1, 2]}))
    before = figures()
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert figures() == [replace(row, by_class={}) for row in before]
    assert before
    kept = [row.by_class for row in store.history.figures(RUN, "accuracy", "test") if row.device != run.device]
    assert kept
    assert all(by_class == {"3": (1, 2)} for by_class in kept)


def test_other_device_with_lost_receipt_still_gets_it(run: Halted, store: Store) -> None:
    """It says which question it has answered; the answer is in the round's result."""
    upload = next(row for row in store.asks.uploads(RUN) if row.device != run.device and row.status == "used")
    ask = store.asks.get(RUN, upload.round, upload.step_number, upload.device)
    assert ask is not None
    assert ask.payload is not None
    assert ask_to_forget(store, RUN, run.device, served=False)
    name = upload_name(upload.round, upload.step_number)
    name.payload = ask.payload
    api = DeviceApi(store)
    identity = service_pb2.Identity(run=RUN, device=upload.device, secret=b"")
    store.database.write("UPDATE devices SET secret_hash = ?", hashlib.sha256(b"").digest())
    said = api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name))
    assert said.receipt.id == upload.receipt


# --- who dies, and who holds things up


@pytest.mark.slow
@pytest.mark.parametrize("point", KILLS)
def test_forgetting_that_is_killed_is_done_again(point: str, run: Halted, store: Store) -> None:
    """A command that dies at forget.after-state or forget.before-note."""
    command = forked_forget_command(run.directory, RUN, run.device)
    command.start(f"{point}=kill")
    command.work(lambda: None)
    assert command.was_killed
    assert store.devices.to_forget(RUN) == [run.device]
    assert store.history.events(RUN, "forgotten") == []
    assert bool(run.files_with_the_part()) == (point == "forget.after-state")
    command.start()
    command.wait_for_the_end()
    assert_forgotten(run, store)


@pytest.mark.slow
def test_an_engine_that_is_killed_forgets_before_its_next_round(run: Halted, store: Store) -> None:
    assert not ask_to_forget(store, RUN, run.device, served=True)
    engine = ForkedEngine(run.prepared)
    for point in KILLS:
        engine.start(f"{point}=kill")
        engine.work(lambda: None)
        assert engine.was_killed
        assert store.runs.open_round(RUN) is None
        assert store.devices.to_forget(RUN) == [run.device]
    engine.start()
    wait_until(lambda: not store.devices.to_forget(RUN), "the device to be forgotten")
    engine.kill()
    assert_forgotten(run, store)


def test_forgetting_waits_for_backup_and_next_call_does_it(
    run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "WAIT_SECONDS", 0.0)
    other = run.open()
    with other.blobs.exclusive() as alone:
        assert alone
        assert not ask_to_forget(store, RUN, run.device, served=False)
        assert_still_to_forget(run, store)
        assert run.parts(store) == run.others(), "what does not have to wait does not"
    other.close()
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert_forgotten(run, store)


class Waker:
    """Runs an action at each wait of an engine; implements the engine's `Waker`."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    async def wait(self, seconds: float = 0.0) -> None:
        self._action()

    def wake_other(self) -> None:
        return


def complete(run: Halted, store: Store) -> None:
    """As if the run had no round left."""
    store.database.write("UPDATE runs SET completed_rounds = ?", run.prepared[0].run.rounds)


def test_an_engine_does_not_end_its_run_before_it_could_forget(run: Halted, store: Store) -> None:
    complete(run, store)
    other = run.open()
    with ExitStack() as stack:
        stack.enter_context(other.blobs.exclusive())

        def look() -> None:
            assert_still_to_forget(run, store)
            assert store.runs.existing(RUN).status == "running"
            stack.close()  # the backup is made

        assert not ask_to_forget(store, RUN, run.device, served=True)
        asyncio.run(run.engine(store, Waker(look)).run())
    other.close()
    assert store.runs.existing(RUN).status == "finished"
    assert_forgotten(run, store)


def test_who_asks_at_the_very_end_of_a_run_is_heard(run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the engine's last look and the end."""
    complete(run, store)
    engine = run.engine(store, Waker(lambda: None))
    forget = engine.forget

    def then_asked() -> None:
        monkeypatch.undo()
        forget()
        assert not ask_to_forget(store, RUN, run.device, served=True)

    monkeypatch.setattr(engine, "forget", then_asked)
    asyncio.run(engine.run())
    assert store.runs.existing(RUN).status == "finished"
    assert_forgotten(run, store)


def test_served_device_of_ended_run_is_forgotten_at_once(run: Halted, store: Store) -> None:
    assert not ask_to_forget(store, RUN, run.device, served=True), "while it runs this is for the engine to do"
    store.runs.set_status(RUN, RunStatus.FINISHED, "")
    assert ask_to_forget(store, RUN, run.device, served=True)
    assert_forgotten(run, store)


# --- who else works on the run


def test_device_to_forget_is_forgotten_as_run_is_cancelled(run: Halted, store: Store) -> None:
    assert not ask_to_forget(store, RUN, run.device, served=True)
    assert LocalStore(run.directory).change(RUN, RunStatus.CANCELLED).status == "cancelled"
    assert_forgotten(run, store)


def all_present(store: Store) -> None:
    """As if all had called again, but for those that are to be forgotten."""
    for row in store.devices.all(RUN):
        store.devices.mark_present(RUN, row.id)


def meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Runs an action when the next state is made, which is not yet the run's."""
    put = store.blobs.put_state

    def later(data: bytes) -> bytes:
        monkeypatch.setattr(store.blobs, "put_state", put)
        action()
        return put(data)

    monkeypatch.setattr(store.blobs, "put_state", later)


def test_two_commands_at_once_undo_nothing_of_each_other(
    run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, (other, left) = run.open(), run.others()

    def forget_the_device() -> None:
        assert ask_to_forget(second, RUN, run.device, served=False)
        assert run.parts(second) == [left], "it does all that is asked for"

    meanwhile(store, monkeypatch, forget_the_device)
    assert ask_to_forget(store, RUN, other, served=False)
    assert run.parts(store) == [left]
    assert run.files_with_the_part() == [], "also not in the state that came too late"
    assert sorted(row.device for row in store.history.events(RUN, "forgotten")) == sorted([run.device, other])
    second.close()


def test_engine_starting_while_command_works_does_the_forgetting(
    run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, engines = run.open(), list[Engine]()

    def serve() -> None:
        engines.append(run.engine(opened))
        engines[0].prepare()

    meanwhile(store, monkeypatch, serve)
    assert not ask_to_forget(store, RUN, run.device, served=False)
    assert_still_to_forget(run, store)
    all_present(store)
    asyncio.run(engines[0].next_cohort())
    assert_forgotten(run, store)
    opened.close()


def test_engine_takes_up_state_changed_by_command_after_reading(run: Halted, store: Store) -> None:
    """The command looked for a server just before there was one."""
    opened = run.open()
    engine = run.engine(opened)
    engine.prepare()
    assert ask_to_forget(store, RUN, run.device, served=False)
    all_present(store)
    asyncio.run(engine.next_cohort())
    assert sorted(engine.method.state_dict()["parts"]) == run.others()
    opened.close()


def test_forgetting_waits_while_server_works_on_open_round(run: Halted, store: Store) -> None:
    number = store.runs.start_round(RUN, run.others())
    assert not ask_to_forget(store, RUN, run.device, served=True)
    assert_still_to_forget(run, store)
    assert store.runs.open_number(RUN) == number


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_round_left_open_by_server_is_closed_as_short(status: str, run: Halted, store: Store) -> None:
    left = run.engine(store)
    number = store.runs.start_round(RUN, sorted([run.device, *run.others()]))
    write_asks(store, number, run.device, *run.others(), run=RUN)
    store.runs.set_status(RUN, RunStatus(status), "")
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert_forgotten(run, store)
    closed = store.runs.rounds(RUN)[-1]
    assert (closed.number, closed.status) == (number, "short")
    assert {ask.status for ask in store.asks.of_step(RUN, number, 1)} == {"out"}
    with pytest.raises(RunError, match="taken over"):  # one that still lives gets no further
        left._store.runs.assert_owner(RUN, left.token)


def test_a_round_that_an_engine_took_up_meanwhile_stays_open(
    run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts just after the command looked for one."""
    number, end = store.runs.start_round(RUN, run.others()), forgetting.end_open_round
    engines: list[Engine] = []

    def then_end(*given: Any) -> None:
        engines.append(run.engine(store))
        end(*given)

    monkeypatch.setattr(forgetting, "end_open_round", then_end)
    assert not ask_to_forget(store, RUN, run.device, served=False)
    assert_still_to_forget(run, store)
    assert store.runs.open_number(RUN) == number
    store.runs.assert_owner(RUN, engines[0].token)


def test_method_notes_are_written_with_state_and_not_before(
    run: Halted, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(method: ClassStatsServer, device: str, notes: Notes) -> None:
        notes.event("member-left-out", "by the merge", device)
        left_out(method, device, notes)

    def fail() -> None:
        raise RunError("taken over")

    left_out = ClassStatsServer.forget
    monkeypatch.setattr(ClassStatsServer, "forget", forget)
    store.devices.ask_to_forget(RUN, run.device)
    method = run.engine(store).method
    with pytest.raises(RunError):
        forgetting.forget_requested(store, RUN, method, fail)
    assert store.history.events(RUN, "member-left-out") == []
    assert ask_to_forget(store, RUN, run.device, served=False)
    assert [row.device for row in store.history.events(RUN, "member-left-out")] == [run.device]


def test_a_device_that_is_not_there_is_a_clear_error(run: Halted, store: Store) -> None:
    with pytest.raises(ConfigurationError, match="there is no run 'no-run'; runs in the store: simulation"):
        ask_to_forget(store, "no-run", "nobody", served=False)
    with pytest.raises(ConfigurationError, match="run 'simulation' has no device 'nobody'"):
        ask_to_forget(store, RUN, "nobody", served=False)


# --- the device, after it was asked for


class Joined:
    """A front's device API with an open round and one device that has been asked."""

    def __init__(self, store: Store, api: DeviceApi) -> None:
        self.store, self.api = store, api
        request = service_pb2.CheckInRequest(identity=make_identity("d1"), profile=make_profile())
        self.identity = make_identity("d1", self.api.check_in(request).secret)
        self.round = open_round(store, "d1")
        write_asks(store, self.round, "d1")

    def forget(self) -> None:
        assert not ask_to_forget(self.store, MADE_RUN, "d1", served=True)

    def begin(self) -> tuple[Payload, UploadSession]:
        """An upload that has only to be finished."""
        payload = make_payload()
        header = service_pb2.UploadHeader(
            identity=self.identity, name=upload_name(self.round), payload=payload.header(), samples=4
        )
        session = self.api.uploads.begin(header)
        for chunk in in_pieces(payload, 1 << 20):
            session.feed(chunk)
        return payload, session  # type: ignore[return-value]

    def status(self, step_number: int) -> str:
        (ask,) = self.store.asks.of_step(MADE_RUN, self.round, step_number)
        return str(ask.status)


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    store = prepare_store(tmp_path / "store")
    with open_api(ServerSection(store=str(tmp_path / "store")), Limits(), lambda: None) as (api, _):
        yield Joined(store, api)
    store.close()


def test_forgotten_device_is_not_asked_though_it_calls_again(joined: Joined) -> None:
    joined.forget()
    joined.api.heartbeat(service_pb2.HeartbeatRequest(identity=joined.identity))
    request = service_pb2.CheckInRequest(identity=joined.identity, profile=make_profile())
    joined.api.check_in(request)
    assert "d1" not in joined.store.devices.present(MADE_RUN)
    assert joined.store.devices.get(MADE_RUN, "d1") is not None
    write_asks(joined.store, joined.round, "d1", step_number=2)
    assert (joined.status(1), joined.status(2)) == ("out", "out")


def at_storing(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Acts in the moment in which the next payload is stored, after the last look at its ask."""
    left = [act]
    monkeypatch.setattr(failpoints, "hit", lambda name: left.pop()() if name == "blob.before-commit" and left else None)


@pytest.mark.parametrize("when", ["before it is stored", "while it is stored"])
def test_an_upload_that_ends_after_it_leaves_nothing(
    when: str, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload, session = joined.begin()
    if when == "while it is stored":
        at_storing(joined.forget, monkeypatch)
    else:
        joined.forget()
    with pytest.raises(RefusedError, match="no longer accepts answers"):
        session.finish()
    assert not joined.store.blobs.has(payload.sha256)
    assert joined.store.blobs.staging() == []


def test_for_an_upload_that_ends_too_late_nobody_is_held_up(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader, which all calls share, writes nothing, and nobody waits for a backup."""

    def refuse(*given: Any) -> None:
        raise AssertionError(given)

    payload, session = joined.begin()
    at_storing(joined.forget, monkeypatch)
    monkeypatch.setattr(joined.api.store.database, "transaction", refuse)
    monkeypatch.setattr(retention, "time", SimpleNamespace(monotonic=time.monotonic, sleep=refuse))
    with joined.store.blobs.exclusive(), pytest.raises(RefusedError, match="no longer accepts answers"):
        session.finish()
    assert joined.store.blobs.has(payload.sha256), "a sweep deletes it"


def test_of_other_devices_what_comes_too_late_is_left_to_a_sweep(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked what all runs need for each of them would hold up every commit."""

    def refuse(*given: Any) -> None:
        raise AssertionError(given)

    payload, session = joined.begin()
    at_storing(lambda: joined.store.runs.close_short_round(MADE_RUN, joined.round, "too few"), monkeypatch)
    monkeypatch.setattr(retention, "needed", refuse)
    with pytest.raises(RefusedError, match="no longer accepts answers"):
        session.finish()
    assert joined.store.blobs.has(payload.sha256)


# --- deleting the young too


@pytest.mark.parametrize("point", long_except(NAMED_LATER, "blob.after-commit", "engine.asks.before-commit"))
def test_run_ends_the_same_though_all_unneeded_data_are_deleted(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every other hit of a failpoint another process sweeps away what is about to be named."""
    wanted = replace(RUNS["fedavg"], rounds=3)
    prepared = prepare(wanted, tmp_path / "work")
    expected = outcome(run_in_memory(prepare(wanted, tmp_path / "undisturbed")))
    store, other = Store.open(tmp_path / "store"), Store.open(tmp_path / "store")
    hits = Counter[str]()

    def hit(name: str) -> None:
        hits[name] += 1
        if name == point and hits[name] % 2 and not tables_of(store).conn.in_transaction:
            assert sweep_all(other, ())

    with ExitStack() as stack:
        api = DeviceApi(store)
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in prepared[1]]
        monkeypatch.setattr(failpoints, "hit", hit)
        asyncio.run(Engine(store, prepared[0], DriveDevices(devices, lambda: None)).run())
        monkeypatch.undo()
    assert outcome(store) == expected
    assert store.blobs.get_state(expected[0])
    assert hits[point] > 1
    store.close()
    other.close()
