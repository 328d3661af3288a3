"""Answers that the disk has damaged after their receipt: found when the engine reads, reported, and asked again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.driving import DriveDevices
from support.fleets import SMALL, assert_no_upload_lost, prepare
from support.parroting import ParrotDevice
from support.record_schema import DEVICES, RUN, recorded_config
from support.wire_samples import make_payload

from fleetdistill.errors import DamagedError, WireError
from fleetdistill.knowledge import NetworkFile
from fleetdistill.state import failpoints
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.engine.cohort import RoundTerms, StoreCohort
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.store.records import Upload
from fleetdistill_server.store.store import Store


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10  # in the tensors' data
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip_a_bit,
    "a letter more in the parts": lambda path: path.write_bytes(path.read_bytes().replace(b':"', b':"A', 1)),  # type: ignore[dict-item]
    "gone": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),  # type: ignore[dict-item]
    "empty": lambda path: path.write_bytes(b""),  # type: ignore[dict-item]
}


class Fleet:
    """An engine and two devices over a store on the disk; the engine's `Waker`.

    Attributes:
        after_answer: Called with the rows of the uploads whenever there is a new one, before the engine sees it.
        before_wait: Called whenever the engine waits, before the devices do anything.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store.open(directory)
        self.api = DeviceApi(self.store)
        self.devices = [ParrotDevice(MemoryLink(self.api), RUN, name) for name in DEVICES]
        self.after_answer: Callable[[list[Upload]], None] = lambda uploads: None
        self.before_wait: Callable[[], None] = lambda: None
        self._seen = 0

    async def wait(self, seconds: float = 0.0) -> None:
        self.before_wait()
        for device in self.devices:
            device.step()
            uploads = self.store.asks.uploads(RUN)
            if len(uploads) > self._seen:
                self._seen = len(uploads)
                self.after_answer(uploads)

    def wake_other(self) -> None:
        return

    def run(self) -> None:
        asyncio.run(Engine(self.store, recorded_config(self.directory), self).run())

    def blob(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self.directory / "blobs" / name[:2] / f"{name}.safetensors"

    def quarantined(self) -> list[str]:
        return sorted(path.name[:64] for path in (self.directory / "blobs" / "quarantine").glob("*"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path / "store")
    yield made
    made.store.close()


def damage_first_answer_of_round_2(fleet: Fleet, damage: Callable[[Path], None]) -> None:
    def act(uploads: list[Upload]) -> None:
        if uploads[-1].round == 2 and uploads[-1].device == "d0" and len(uploads) == 3:
            damage(fleet.blob(uploads[-1].sha256))

    fleet.after_answer = act


def first_and_second(store: Store) -> list[Upload]:
    """Both answers of d0 to round 2."""
    return [row for row in store.asks.uploads(RUN) if (row.round, row.device) == (2, "d0")]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_answer_is_reported_and_its_device_asked_again(fleet: Fleet, name: str) -> None:
    damage_first_answer_of_round_2(fleet, DAMAGES[name])
    fleet.run()
    lost, again = first_and_second(fleet.store)
    assert (lost.status, lost.attempt) == ("reported", 1)
    assert lost.reason.startswith(f"the payload was lost on the server: payload {lost.sha256.hex()} is ")
    assert (again.status, again.attempt, again.quarantined_at) == ("used", 2, None)
    (event,) = fleet.store.history.events(RUN, "quarantined")
    assert (event.round, event.device) == (2, "d0")
    assert lost.sha256.hex() in event.text
    assert "the device is asked again" in event.text
    assert fleet.quarantined() == ([] if name == "gone" else [lost.sha256.hex()])
    assert fleet.store.runs.existing(RUN).completed_rounds == 4
    assert_no_upload_lost(fleet.store, {receipt.id for device in fleet.devices for receipt in device.receipts}, RUN)


def test_answer_damaged_after_early_read_is_asked_again(fleet: Fleet) -> None:
    """The engine checks d1's answer while it waits for d0, and again when it uses it."""
    both = fleet.devices

    def only_the_second_then_both() -> None:
        rows = [row for row in fleet.store.asks.uploads(RUN) if row.round == 2]
        if [row.device for row in rows] == ["d1"] and fleet.devices != both:  # read, as the engine waits again
            flip_a_bit(fleet.blob(rows[0].sha256))
            fleet.devices = both
        elif fleet.store.runs.open_number(RUN) == 2 and not rows:
            fleet.devices = both[1:]

    fleet.before_wait = only_the_second_then_both
    fleet.run()
    lost, again = [row for row in fleet.store.asks.uploads(RUN) if (row.round, row.device) == (2, "d1")]
    assert (lost.status, again.status) == ("reported", "used")
    assert_no_upload_lost(fleet.store, {receipt.id for device in both for receipt in device.receipts}, RUN)


def test_an_undamaged_run_quarantines_nothing(fleet: Fleet) -> None:
    fleet.run()
    assert fleet.store.history.events(RUN, "quarantined") == []
    assert {row.status for row in fleet.store.asks.uploads(RUN)} == {"used"}


@pytest.mark.parametrize("point", ["before-move", "after-move", "after-commit"])
def test_engine_failing_in_the_middle_ends_like_undisturbed_one(fleet: Fleet, point: str) -> None:
    damage_first_answer_of_round_2(fleet, flip_a_bit)
    with failpoints.switched_on(f"engine.quarantine.{point}=error"), pytest.raises(OSError, match="a failpoint"):
        fleet.run()
    fleet.run()
    lost, again = first_and_second(fleet.store)
    assert (lost.status, again.status) == ("reported", "used")
    assert len(fleet.store.history.events(RUN, "quarantined")) == 1
    assert fleet.quarantined() == [lost.sha256.hex()]
    assert_no_upload_lost(fleet.store, {receipt.id for device in fleet.devices for receipt in device.receipts}, RUN)


def test_answer_read_before_crash_is_verified_again_after_it(fleet: Fleet) -> None:
    class Crash(Exception):
        pass

    def act(uploads: list[Upload]) -> None:
        if uploads[-1].round == 2 and uploads[-1].device == "d1":
            raise Crash

    fleet.after_answer = act
    with suppress(Crash):
        fleet.run()
    fleet.after_answer = lambda uploads: None
    flip_a_bit(fleet.blob(first_and_second(fleet.store)[0].sha256))
    fleet.run()
    assert [row.status for row in first_and_second(fleet.store)] == ["reported", "used"]


def answered_round(fleet: Fleet, deadline_at: float = math.inf) -> Upload:
    """An open round with an ask that d0 has answered; returns the upload's row."""
    with failpoints.switched_on("engine.answer.after-read=error"), suppress(OSError):
        fleet.run()
    fleet.store.database.write("UPDATE asks SET deadline_at = ?", min(deadline_at, 1e10))
    (upload,) = [row for row in fleet.store.asks.uploads(RUN) if row.device == "d0"]
    return upload


def test_after_the_deadline_the_device_is_out_with_the_reason(fleet: Fleet) -> None:
    upload = answered_round(fleet, deadline_at=1.0)
    fleet.store.asks.withdraw_upload(upload.ask, "payload is damaged")
    ask = fleet.store.asks.get(RUN, 1, 1, "d0")
    assert ask is not None
    assert (ask.status, ask.reason) == ("out", "the answer was lost on the server, deadline passed")
    assert "drops out of the round: deadline passed" in fleet.store.history.events(RUN, "quarantined")[0].text


def test_a_device_that_has_gone_is_not_waited_for(fleet: Fleet) -> None:
    upload = answered_round(fleet)
    fleet.store.devices.mark_absent(RUN, "d0", "lease ended")
    fleet.store.asks.withdraw_upload(upload.ask, "payload is damaged")
    ask = fleet.store.asks.get(RUN, 1, 1, "d0")
    assert ask is not None
    assert (ask.status, ask.reason) == ("out", "the answer was lost on the server, device not present")


def test_taking_back_twice_is_once(fleet: Fleet) -> None:
    upload = answered_round(fleet)
    for _ in range(2):
        fleet.store.asks.withdraw_upload(upload.ask, "payload is damaged")
    assert len(fleet.store.history.events(RUN, "quarantined")) == 1
    assert fleet.store.asks.next_open(RUN, "d0") is not None


def test_old_attempt_has_no_receipt_until_its_data_are_back(fleet: Fleet) -> None:
    upload = answered_round(fleet)
    device = fleet.devices[0]
    name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
    status = service_pb2.UploadStatusRequest(identity=device.identity, name=name)
    assert fleet.api.uploads.status(status).receipt.id == upload.receipt
    fleet.blob(upload.sha256).unlink()
    fleet.store.asks.withdraw_upload(upload.ask, "payload is gone")
    told = fleet.api.uploads.status(status)
    assert (told.HasField("receipt"), told.next_byte, told.ask_open) == (False, 0, True)
    ask = fleet.api.next_ask(device.identity)
    assert ask is not None
    assert ask.ask.first_attempt == 2
    receipt = device.answer(ask.ask, attempt=1)  # it still had them
    assert receipt.id != upload.receipt
    assert fleet.api.uploads.status(status).receipt == receipt
    assert fleet.store.blobs.open(receipt.sha256, verify=True).data_bytes == receipt.data_bytes


# --- what the server itself sends and keeps


def test_a_damaged_checkpoint_ends_the_engine_with_a_sentence(fleet: Fleet) -> None:
    answered_round(fleet)
    checkpoint = fleet.store.runs.existing(RUN).checkpoint
    path = fleet.directory / "blobs" / checkpoint.hex()[:2] / f"{checkpoint.hex()}.safetensors"
    flip_a_bit(path)
    with pytest.raises(DamagedError, match=f"checkpoint {checkpoint.hex()} is damaged: its SHA-256 does not match"):
        fleet.run()
    path.unlink()
    without = rf"is not in the store; no intact earlier checkpoint is kept. Copy blobs/../{checkpoint.hex()}"
    with pytest.raises(DamagedError, match=f"checkpoint {checkpoint.hex()} {without}"):
        fleet.run()


def test_the_reason_of_a_lost_checkpoint_names_the_way_back(fleet: Fleet) -> None:
    answered_round(fleet)
    for content in (b"the first", b"the second"):
        number = fleet.store.runs.open_number(RUN) or fleet.store.runs.start_round(RUN, [])
        fleet.store.runs.close_round(RUN, number, fleet.store.blobs.put_state(content), [], {})
    checkpoint = fleet.store.runs.existing(RUN).checkpoint
    (fleet.directory / "blobs" / checkpoint.hex()[:2] / f"{checkpoint.hex()}.safetensors").unlink()
    stop, back = f"`fleetdistill runs stop {RUN}`", f"`fleetdistill runs rollback {RUN} --to {number - 1}`"
    way_back = f"{stop}, then {back} returns to the newest one before it"
    with pytest.raises(DamagedError, match=f"checkpoint {checkpoint.hex()} is not in the store; {way_back}"):
        Fleet(fleet.directory).run()
    before, first = reversed(fleet.store.runs.checkpoints(RUN)[:-1])
    flip_a_bit(fleet.directory / "blobs" / before.sha256.hex()[:2] / f"{before.sha256.hex()}.safetensors")
    way_back = way_back.replace(f"--to {before.round}", f"--to {first.round}")
    with pytest.raises(DamagedError, match=f"checkpoint {checkpoint.hex()} is not in the store; {way_back}"):
        Fleet(fleet.directory).run()


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_a_damaged_payload_of_an_open_ask_is_made_again(fleet: Fleet, damage: Callable[[Path], None]) -> None:
    answered_round(fleet)
    ask = fleet.store.asks.get(RUN, 1, 1, "d1")
    assert ask is not None
    fleet.store.database.write("UPDATE asks SET status = 'open' WHERE id = ?", ask.id)
    fleet.store.database.write("DELETE FROM uploads WHERE ask = ?", ask.id)
    damage(fleet.blob(ask.payload))
    started_again = Fleet(fleet.directory)
    started_again.run()
    assert fleet.store.runs.existing(RUN).status == "finished"
    assert fleet.store.history.events(RUN, "declined") == []
    started_again.store.close()


class Declining(ParrotDevice):
    """As a device of the SDK: what it cannot read it declines."""

    def answer(self, ask: service_pb2.Ask, attempt: int = 1) -> service_pb2.Receipt:
        try:
            return super().answer(ask, attempt)
        except WireError as error:
            self.link.decline(
                service_pb2.DeclineRequest(
                    identity=self.identity, round=ask.round, step_number=ask.step_number, reason=str(error)
                )
            )
            return service_pb2.Receipt()


def test_damaged_question_is_mended_after_the_round_it_failed(fleet: Fleet) -> None:
    """The engine wrote the payload itself, and asks with the same one again: its state is that of before."""
    fleet.devices = [Declining(MemoryLink(fleet.api), RUN, name) for name in DEVICES]
    damaged: list[bytes] = []

    def look() -> None:
        ask = fleet.store.asks.get(RUN, 1, 1, "d1")
        if ask is not None and not damaged:
            damaged.append(ask.payload)
            flip_a_bit(fleet.blob(ask.payload))
        assert len(fleet.store.runs.rounds(RUN)) < 10, "round after round fails"

    fleet.before_wait = look
    fleet.run()
    assert [row.status for row in fleet.store.runs.rounds(RUN)] == ["short", *["closed"] * 4]
    assert fleet.quarantined() == [damaged[0].hex()]
    again = fleet.store.asks.get(RUN, 2, 1, "d1")
    assert again is not None
    assert again.payload == damaged[0]


def test_what_devices_cannot_fetch_is_told_once(fleet: Fleet) -> None:
    answered_round(fleet)
    ask = fleet.store.asks.get(RUN, 1, 1, "d1")
    assert ask is not None
    fleet.store.database.write("UPDATE asks SET status = 'open' WHERE id = ?", ask.id)
    fleet.blob(ask.payload).unlink()
    wanted = service_pb2.DownloadRequest(identity=fleet.devices[1].identity, sha256=ask.payload)
    for _ in range(2):
        with pytest.raises(DamagedError, match="is not in the store"):
            fleet.api.downloads.open(wanted)
    (event,) = fleet.store.history.events(RUN, "quarantined")
    assert (event.round, ask.payload.hex() in event.text) == (1, True)


def test_lost_payload_changed_by_replay_costs_device_not_run(fleet: Fleet) -> None:
    answered_round(fleet)
    ask = fleet.store.asks.get(RUN, 1, 1, "d1")
    assert ask is not None
    other = make_payload()
    fleet.store.blobs.put(other)
    flip_a_bit(fleet.blob(other.sha256))
    fleet.store.database.write("UPDATE asks SET status = 'open', payload = ? WHERE id = ?", other.sha256, ask.id)
    fleet.store.database.write("DELETE FROM uploads WHERE ask = ?", ask.id)
    fleet.run()
    now = fleet.store.asks.get(RUN, 1, 1, "d1")
    assert now is not None
    assert now.status == "out"
    assert now.reason.startswith(f"the payload of the ask was lost on the server: payload {other.sha256.hex()}")
    (event,) = fleet.store.history.events(RUN, "quarantined")
    assert (event.round, event.device) == (1, "d1")
    assert fleet.quarantined() == [other.sha256.hex()]
    assert fleet.store.runs.existing(RUN).status == "finished"


def test_payload_deleted_before_its_ask_is_made_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of another process looked at its age just before it was put again."""
    put = fleet.store.blobs.put
    written: list[bytes] = []

    def put_and_lose(payload: Payload) -> None:
        put(payload)
        if fleet.store.runs.open_round(RUN) is not None:
            written.append(payload.sha256)
            if len(written) == 1:  # all devices are asked with the same one
                fleet.blob(payload.sha256).unlink()

    monkeypatch.setattr(fleet.store.blobs, "put", put_and_lose)
    fleet.run()
    assert len(written) == 6, "four rounds, the end result, and once more"
    assert [row.status for row in fleet.store.runs.rounds(RUN)] == ["closed"] * 4


class Answering:
    """A waker that answers every open ask of the store by itself."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.answers: dict[tuple[int, str], bytes] = {}

    async def wait(self, seconds: float = 0.0) -> None:
        for step in (1, 2):
            for ask in self._store.asks.of_step(RUN, 1, step):
                if ask.status == "open":
                    payload = make_payload(10 * step + int(ask.device[1:]))
                    self._store.blobs.put(payload)
                    self._store.asks.accept_upload(ask.id, 1, payload.sha256, payload.data_bytes, 1)
                    self.answers[step, ask.device] = payload.sha256

    def wake_other(self) -> None:
        return


@pytest.mark.parametrize("wanted", [0, 2])
def test_device_out_at_replay_of_round_is_not_in_later_steps(tmp_path: Path, wanted: int) -> None:
    """d1's answer to the first step is lost after its deadline; its answer to the second one is there."""
    store = Store.open(tmp_path / "store")
    store.runs.begin(RUN, {})
    names = ["d1", "d2", "d3"]
    for name in names:
        store.devices.register(RUN, name, b"", b"")
    store.runs.start_round(RUN, names)
    waker = Answering(store)
    terms = RoundTerms(
        run=RUN,
        seed=1,
        quorum=0.5,
        deadline_seconds=1000.0,
        devices_per_round=wanted,
        knowledge_type=np.dtype("float32"),
        steps={},
    )

    async def play(cohort: StoreCohort) -> list[list[str]]:
        return [[answer.device async for answer in cohort.ask(step)] for step in ("one", "two")]

    def cohort() -> StoreCohort:
        return StoreCohort(store, terms, waker, number=1, completed=0, devices=names)

    assert asyncio.run(play(cohort())) == [names, names]
    store.blobs.path_of(waker.answers[1, "d1"]).unlink()  # type: ignore[attr-defined]
    store.database.write("UPDATE asks SET deadline_at = 1 WHERE step_number = 1")
    (third,) = [ask for ask in store.asks.of_step(RUN, 1, 2) if ask.device == "d3"]
    store.database.write("DELETE FROM uploads WHERE ask = ?", third.id)
    store.database.write("UPDATE asks SET status = 'open' WHERE id = ?", third.id)
    again = cohort()
    assert asyncio.run(play(again)) == [["d2", "d3"], ["d2", "d3"]]
    assert sorted(again.used) == sorted(
        ask.id for step in (1, 2) for ask in store.asks.of_step(RUN, 1, step) if ask.device != "d1"
    )
    store.close()


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_initial_weights_are_made_again_from_the_seed(fleet: Fleet, name: str) -> None:
    answered_round(fleet)
    sha256 = fleet.api.sessions.contract(RUN).initial_weights
    DAMAGES[name](fleet.blob(sha256))
    with pytest.raises(DamagedError):
        fleet.store.blobs.open(sha256, verify=True)
    fleet.run()
    assert fleet.store.blobs.open(sha256, verify=True).sha256 == sha256


def test_initial_weights_that_cannot_be_remade_end_engine(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_round(fleet)
    flip_a_bit(fleet.blob(fleet.api.sessions.contract(RUN).initial_weights))
    monkeypatch.setattr(FedAvgServer, "initial", lambda self: None)
    with pytest.raises(DamagedError, match="is damaged: its BLAKE3 does not match"):
        fleet.run()


FILE = NetworkFile(onnx=np.arange(50, dtype=np.uint8))
OTHER = NetworkFile(onnx=np.zeros(50, np.uint8))


def give_extractor(monkeypatch: pytest.MonkeyPatch, file: NetworkFile) -> None:
    monkeypatch.setattr(FedAvgServer, "extractor_file", lambda self: file)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_extractor_file_is_made_again(fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_extractor(monkeypatch, FILE)
    answered_round(fleet)
    sha256 = fleet.api.sessions.contract(RUN).extractor_file
    DAMAGES[name](fleet.blob(sha256))
    with pytest.raises(DamagedError):
        fleet.store.blobs.open(sha256, verify=True)
    fleet.run()
    assert decode(fleet.store.blobs.open(sha256, verify=True)).keys() == {"extractor"}


def test_a_run_keeps_the_extractor_file_that_it_began_with(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may write the same network in other bytes; what devices have fetched is still the contract's."""
    give_extractor(monkeypatch, FILE)
    answered_round(fleet)
    sha256 = fleet.api.sessions.contract(RUN).extractor_file
    give_extractor(monkeypatch, OTHER)
    fleet.run()
    assert fleet.api.sessions.contract(RUN).extractor_file == sha256
    assert fleet.store.blobs.has(sha256)
    assert not fleet.store.blobs.has(encode({"extractor": OTHER}).sha256)


def test_extractor_file_that_cannot_be_remade_ends_engine(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    give_extractor(monkeypatch, FILE)
    answered_round(fleet)
    flip_a_bit(fleet.blob(fleet.api.sessions.contract(RUN).extractor_file))
    give_extractor(monkeypatch, OTHER)
    with pytest.raises(DamagedError, match="is damaged: its BLAKE3 does not match"):
        fleet.run()


# --- the SDK


class NotingLink(MemoryLink):
    """Notes the receipts that go out."""

    def __init__(self, api: DeviceApi) -> None:
        super().__init__(api)
        self.receipts: set[str] = set()

    def upload(
        self,
        header: service_pb2.UploadHeader,
        chunks: Iterator[knowledge_pb2.Chunk],  # type: ignore[override]
    ) -> service_pb2.Receipt:
        receipt = super().upload(header, chunks)
        self.receipts.add(receipt.id)
        return receipt


@pytest.mark.slow
def test_sdk_device_answers_anew_from_its_present_state(tmp_path: Path) -> None:
    config, specs, work = prepare(replace(SMALL, method="fedavg"), tmp_path / "work")
    store = Store.open(work / "store")
    api = DeviceApi(store)
    damaged: list[Upload] = []

    def damage_the_first() -> None:
        uploads = store.asks.uploads(config.run.name)
        if uploads and not damaged:
            damaged.append(uploads[0])
            name = uploads[0].sha256.hex()
            flip_a_bit(work / "store" / "blobs" / name[:2] / f"{name}.safetensors")

    with ExitStack() as stack:
        link = NotingLink(api)
        devices = [stack.enter_context(make_device(spec, link)) for spec in specs]  # type: ignore[arg-type]
        asyncio.run(Engine(store, config, DriveDevices(devices, damage_the_first)).run())
    answers = [row for row in store.asks.uploads(config.run.name) if row.ask == damaged[0].ask]
    assert [(row.attempt, row.status) for row in answers] == [(1, "reported"), (2, "used")]
    assert {row.receipt for row in answers} <= link.receipts
    assert_no_upload_lost(store, link.receipts)
    store.close()
