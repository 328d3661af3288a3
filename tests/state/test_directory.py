"""A device's state directory: one device at a time, and no crash leaves a state that is half one and half the other."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from support.open_device import open_device
from support.wire_samples import data_of, make_payload

from fleetdistill import Device
from fleetdistill.errors import NoRoomError, StateError
from fleetdistill.replacement import Replacement
from fleetdistill.state.directory import Storage
from fleetdistill.state.files import Files
from fleetdistill.state.format import FORMAT, json_object, sealed_json
from fleetdistill.state.outbox import Outbox, Outcome, Pending
from fleetdistill.state.saved_profile import save_profile
from fleetdistill.wire.v1 import contract_pb2

PENDING = Pending(round=3, step_number=2, attempt=1, samples=40)
NOWHERE = "127.0.0.1:1"  # never contacted


def put(
    storage: Storage, pending: Pending = PENDING, candidate: bytes = b"new state", delivered: bytes | None = None
) -> None:
    storage.outbox.put(pending, make_payload(), candidate, delivered)


def kill(storage: Storage) -> None:
    """What the end of a process does: the lock goes, nothing else happens."""
    storage.close()


# --- one device at a time


def test_a_directory_belongs_to_one_device_at_a_time(tmp_path: Path) -> None:
    first = Storage(tmp_path / "state")
    with pytest.raises(StateError) as error:
        Storage(tmp_path / "state")
    assert str(error.value) == (
        f"{tmp_path / 'state'} is in use by another device, of this process or another, that is not closed; "
        "each device requires its own state directory"
    )
    first.close()
    Storage(tmp_path / "state").close()


def test_the_lock_holds_between_processes_and_ends_with_them(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from fleetdistill.state.directory import Storage
        storage = Storage(Path(sys.argv[1]))
        print("held", flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(StateError, match="is in use by another device"):
        Storage(tmp_path)
    other.kill()
    other.communicate()
    Storage(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=f"the state directory {tmp_path / 'file'} cannot be used: "):
        Storage(tmp_path / "file")


def test_a_full_disk_is_a_state_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"cannot be used: \[Errno 28\] No space left on device"):
        put(storage)
    monkeypatch.undo()
    assert storage.outbox.pending() is None
    storage.close()


# --- identity


def test_the_identity_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert storage.load_identity() == {}
    identity = {"device": "d1", "run": "digits", "secret": "ab" * 32}
    mask = os.umask(0)  # the mode must not hang on the process's mask
    try:
        storage.save_identity({})
        storage.save_identity(identity)
    finally:
        os.umask(mask)
    assert storage.load_identity() == identity
    assert stat.S_IMODE((tmp_path / "device.json").stat().st_mode) == 0o600
    storage.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"[1]", b"\xff\xfe", b'{"device": "d1"'])
def test_a_damaged_identity_is_never_taken_for_a_new_device(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "device.json").write_bytes(content)
    storage = Storage(tmp_path)
    with pytest.raises(StateError) as error:
        storage.load_identity()
    assert str(error.value).startswith(f"{tmp_path / 'device.json'} is damaged: ")
    assert "JSON" not in str(error.value).split("; ")[0] or "cannot be read as JSON. Restore" in str(error.value)
    assert "erase the directory with `fleetdistill device forget DIR --local`" in str(error.value)
    storage.close()


def make_device(directory: Path, **settings: Any) -> Device:
    return open_device(server=NOWHERE, worker=lambda contract: None, state_dir=directory, **settings)


@pytest.mark.parametrize(
    ("settings", "known", "given"),
    [
        ({"run": "letters"}, "run 'digits'", "'letters'"),
        ({"device_id": "d2"}, "device id 'd1'", "'d2'"),
        ({"run": "digits", "device_id": "d2"}, "device id 'd1'", "'d2'"),
    ],
)
def test_directory_of_other_run_or_device_is_refused_and_freed(
    tmp_path: Path, settings: dict[str, str], known: str, given: str
) -> None:
    (tmp_path / "device.json").write_text(json.dumps({"device": "d1", "run": "digits", "secret": "ab" * 32}))
    storage = Storage(tmp_path)
    save_profile(storage, contract_pb2.DeviceProfile())  # a server has accepted the device
    storage.close()
    with pytest.raises(StateError) as error:
        make_device(tmp_path, **settings)
    assert str(error.value) == (
        f"the state directory {tmp_path} belongs to {known}, not {given}; use another directory or {known}"
    )
    with make_device(tmp_path, run="digits") as device:  # the refused one holds no lock
        assert device.device_id == "d1"


def test_two_devices_on_one_directory_are_refused(tmp_path: Path) -> None:
    with make_device(tmp_path), pytest.raises(StateError, match="is in use by another device"):
        make_device(tmp_path)


# --- the outbox


def test_an_answer_waits_with_its_payload_and_its_state(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert storage.outbox.pending() is None
    storage.save("state.safetensors", b"old state")
    put(storage)
    kill(storage)

    again = Storage(tmp_path)
    assert again.outbox.pending() == PENDING
    with again.outbox.answer() as payload:
        assert payload.header() == make_payload().header()
        assert data_of(payload) == data_of(make_payload())
        assert payload.source.read(33, 7) == data_of(make_payload())[33:40]
    assert again.load("state.safetensors") == b"old state"
    again.close()


def test_a_receipt_makes_the_candidate_the_state(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.save("state.safetensors", b"old state")
    put(storage)
    storage.outbox.promote(replaced=True)
    assert list((tmp_path / "outbox").iterdir()) == []
    assert storage.outbox.pending() is None
    assert storage.load("state.safetensors") == b"new state"
    storage.close()


def test_a_refusal_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.save("state.safetensors", b"old state")
    put(storage)
    storage.outbox.drop()
    assert storage.outbox.pending() is None
    assert storage.load("state.safetensors") == b"old state"
    storage.outbox.drop()  # nothing there is no error
    storage.close()


def test_an_unknown_file_is_none(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert storage.load("profile.bin") is None
    storage.close()


# --- crashes


class Crash(BaseException):
    """The process ends here."""


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ends the process right before its n-th fsync, rename or deletion, counted from 0."""
    count = [0]

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count[0] == step:
                raise Crash
            count[0] += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", guarded(os.fsync))
    monkeypatch.setattr(Path, "replace", guarded(Path.replace))
    monkeypatch.setattr(Path, "unlink", guarded(Path.unlink))
    return count


def every_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Storage], None], act: Callable[[Storage], None]
) -> list[Storage]:
    """Runs `act` with a crash before each of its steps; returns what the restarted process opens, crash by crash."""
    result = []
    for step in range(100):
        storage = Storage(tmp_path / str(step))
        prepare(storage)
        with monkeypatch.context() as patched:
            crash_at(step, patched)
            try:
                act(storage)
                crashed = False
            except Crash:
                crashed = True
        kill(storage)
        result.append(Storage(tmp_path / str(step)))
        if not crashed:
            return result
    raise AssertionError("it never ends")


def whole_answer(storage: Storage) -> bool:
    """True if an answer is pending, and then all of it is there; False if none is."""
    pending = storage.outbox.pending()
    if pending is None:
        return False
    assert pending == PENDING
    with storage.outbox.answer() as payload:
        assert data_of(payload) == data_of(make_payload())
    return True


def test_crash_while_storing_answer_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(storage: Storage) -> None:
        storage.save("state.safetensors", b"old state")

    restarted = every_crash(tmp_path, monkeypatch, prepare, put)
    whole = [whole_answer(storage) for storage in restarted]
    assert whole == sorted(whole), "once it is there it stays"
    assert set(whole) == {False, True}
    assert len(whole) > 8  # four files, each with content, name and directory
    for storage in restarted:
        assert storage.load("state.safetensors") == b"old state"
        put(storage)  # whatever was left behind is no obstacle
        assert whole_answer(storage)
        storage.close()


def test_remains_of_earlier_crash_never_mix_with_new_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died while it cleared the outbox, started again, and died while it put the next answer away."""

    def prepare(storage: Storage) -> None:
        old = Pending(round=2, step_number=2, attempt=1, samples=40)
        storage.outbox.put(old, make_payload(7), b"older state")
        (storage.directory / "outbox" / "manifest.json").unlink()

    restarted = every_crash(tmp_path, monkeypatch, prepare, put)
    assert {whole_answer(storage) for storage in restarted} == {False, True}
    for storage in restarted:
        if storage.outbox.pending():
            storage.outbox.promote(replaced=True)
            assert storage.load("state.safetensors") == b"new state"
        storage.close()


def test_crash_while_settling_receipt_keeps_answer_or_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(storage: Storage) -> None:
        storage.save("state.safetensors", b"old state")
        put(storage)

    restarted = every_crash(tmp_path, monkeypatch, prepare, lambda storage: storage.outbox.promote(replaced=True))
    outcomes = set()
    for storage in restarted:
        outcomes.add((whole_answer(storage), storage.load("state.safetensors")))
        assert storage.outbox.pending() is None or whole_answer(storage)
        storage.close()
    assert outcomes == {(True, b"old state"), (False, b"new state")}


def test_crash_while_settling_delivers_reported_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the answer is pending either model may lie there: settling again delivers the new one."""

    def prepare(storage: Storage) -> None:
        storage.save("delivered.safetensors", b"old model")
        put(storage, delivered=b"new model")

    restarted = every_crash(tmp_path, monkeypatch, prepare, lambda storage: storage.outbox.promote(replaced=True))
    outcomes = set()
    for storage in restarted:
        outcomes.add((whole_answer(storage), storage.load("delivered.safetensors")))
        if storage.outbox.pending():
            storage.outbox.promote(replaced=True)
        assert storage.load("delivered.safetensors") == b"new model"
        assert storage.load("state.safetensors") == b"new state"
        storage.close()
    assert outcomes == {(True, b"old model"), (True, b"new model"), (False, b"new model")}


def test_model_left_by_crash_is_not_delivered_by_later_answer(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.save("delivered.safetensors", b"old model")
    put(storage, delivered=b"never reported")
    (tmp_path / "outbox" / "manifest.json").unlink()
    put(storage)
    storage.outbox.promote(replaced=True)
    assert storage.load("delivered.safetensors") == b"old model"
    storage.close()


def unsealed(path: Path) -> str:
    """A JSON file without its checksum, which is checked."""
    return json.dumps(json_object(path, path.read_bytes()))


@pytest.mark.parametrize("replacement", [None, Replacement(True), Replacement(False, 0.5, 0.75)])
def test_whether_the_apps_model_is_replaced_survives_a_restart(tmp_path: Path, replacement: Replacement | None) -> None:
    storage = Storage(tmp_path)
    pending = Pending(3, 2, 1, 40, replacement)
    put(storage, pending)
    kill(storage)
    again = Storage(tmp_path)
    assert again.outbox.pending() == pending
    again.close()


def test_the_files_of_the_outbox_have_the_names_of_their_format(tmp_path: Path) -> None:
    """Other versions of the SDK read them."""
    storage = Storage(tmp_path)
    pending = Pending(3, 2, 1, 40, Replacement(True, 0.75, 0.5, "personal"), {"test": [[1, 0], [0, 1]]}, "ab")
    put(storage, pending)
    answer = (
        '{"round": 3, "step_number": 2, "attempt": 1, "samples": 40, "replacement": {"replaced": true, '
        '"accuracy": 0.75, "accuracy_in_use": 0.5, "variant": "personal", "received": false, "pinned": false}, '
        '"scores": {"test": [[1, 0], [0, 1]]}, "payload": "ab", '
        '"step": "", "columns": {}}'
    )
    digests = {"candidate": google_crc32c.value(b"new state"), "delivered": None}
    assert unsealed(tmp_path / "outbox" / "manifest.json") == (
        f'{{"format": 1, {answer[1:-1]}, "digests": {json.dumps(digests)}}}'
    )
    storage.outbox.save_outcome(Outcome(pending, "r1", tries=2))
    assert unsealed(tmp_path / "outbox" / "outcome.json") == (
        f'{{"format": 1, "pending": {answer}, "receipt": "r1", "code": "", "text": "", "details": {{}}, "tries": 2}}'
    )
    assert storage.outbox.outcome() == Outcome(pending, "r1", tries=2)
    storage.close()


def test_a_crash_while_an_answer_is_dropped_keeps_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(storage: Storage) -> None:
        storage.save("state.safetensors", b"old state")
        put(storage)

    restarted = every_crash(tmp_path, monkeypatch, prepare, lambda storage: storage.outbox.drop())
    whole = [whole_answer(storage) for storage in restarted]
    assert whole == sorted(whole, reverse=True)
    assert set(whole) == {False, True}
    for storage in restarted:
        assert storage.load("state.safetensors") == b"old state"
        storage.close()


def test_a_crash_while_a_file_is_saved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted = every_crash(
        tmp_path,
        monkeypatch,
        lambda storage: storage.save_identity({"device": "old"}),
        lambda storage: storage.save_identity({"device": "new"}),
    )
    names = [storage.load_identity()["device"] for storage in restarted]
    assert names == ["old", "old", "new", "new"]  # before fsync, before rename, before the directory's, after
    for storage in restarted:
        storage.close()


def test_the_manifest_is_gone_from_the_disk_before_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may keep the deletions in any order unless the directory is synced between them."""
    storage = Storage(tmp_path)
    put(storage)
    steps: list[str] = []
    fsync, unlink = os.fsync, Path.unlink

    def noted_unlink(self: Path, missing_ok: bool = False) -> None:
        steps.append(self.name)
        unlink(self, missing_ok)

    def noted_fsync(descriptor: int) -> None:
        steps.append("fsync")
        fsync(descriptor)

    monkeypatch.setattr(Path, "unlink", noted_unlink)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    storage.outbox.drop()
    assert steps[:2] == ["manifest.json", "fsync"]
    storage.close()


# --- damage


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"round": 1}', b'{"who": "knows"}', b"x" * 40])
@pytest.mark.parametrize("name", ["manifest.json", "candidate.safetensors", "header.bin", "data.bin"])
def test_a_damaged_answer_is_put_aside_and_the_device_continues(tmp_path: Path, name: str, content: bytes) -> None:
    storage = Storage(tmp_path)
    put(storage)
    (tmp_path / "outbox" / name).write_bytes(content)
    kill(storage)
    again = Storage(tmp_path)
    assert again.outbox.pending() is None
    (aside,) = again.put_aside
    assert (aside.path, aside.kept_as) == (tmp_path / "outbox", tmp_path / "outbox.damaged-1")
    assert f"outbox is damaged: {name}: " in aside.text
    assert "its answer is dropped; the device continues from its last receipt" in aside.text
    assert (tmp_path / "outbox.damaged-1" / name).read_bytes() == content
    put(again)
    assert again.outbox.pending() == PENDING
    again.close()


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 40, b"\x10\x07"])
def test_a_damaged_header_is_a_state_error(tmp_path: Path, content: bytes | None) -> None:
    storage = Storage(tmp_path)
    put(storage)
    path = tmp_path / "outbox" / "header.bin"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(StateError, match=r"outbox/header.bin is damaged: "), storage.outbox.answer():
        pass
    storage.close()


def test_missing_data_are_a_state_error(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    put(storage)
    (tmp_path / "outbox" / "data.bin").unlink()
    with pytest.raises(StateError, match=r"data\.bin is damaged: the file is missing"), storage.outbox.answer():
        pass
    storage.close()


def test_manifest_without_candidate_is_answer_with_receipt(tmp_path: Path) -> None:
    """The crash fell between promoting the candidate and clearing the outbox."""
    storage = Storage(tmp_path)
    put(storage)
    (tmp_path / "outbox" / "candidate.safetensors").unlink()
    assert storage.outbox.pending() is None
    assert list((tmp_path / "outbox").iterdir()) == []
    storage.close()


# --- room


def test_answer_over_device_limit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    needed = make_payload().data_bytes + len(b"new state")
    storage = Storage(tmp_path, max_answer_bytes=needed - 1)
    storage.save("state.safetensors", b"old state")
    with pytest.raises(NoRoomError) as error:
        put(storage)
    assert str(error.value) == (
        f"the answer and its state are {needed} bytes, the limit is {needed - 1} bytes; raise Budgets(spool_bytes=...)"
    )
    assert storage.outbox.pending() is None
    assert storage.load("state.safetensors") == b"old state"
    storage.close()
    exact = Storage(tmp_path, max_answer_bytes=needed)
    put(exact)
    assert whole_answer(exact)
    exact.close()


def test_answer_without_disk_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(NoRoomError, match=r"the answer and its state are \d+ bytes, but the disk has 100 bytes free"):
        put(storage)
    assert list((tmp_path / "outbox").iterdir()) == []
    storage.close()


@pytest.mark.parametrize("at", range(4))
def test_disk_filled_half_way_keeps_no_half_answer_and_next_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    storage = Storage(tmp_path)
    storage.save("state.safetensors", b"old state")
    left, fsync = [at], os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StateError):
            put(storage)
    storage.outbox.drop()  # what the next answer finds, or the next process
    assert storage.outbox.pending() is None
    assert storage.load("state.safetensors") == b"old state"
    put(storage)
    assert whole_answer(storage)
    storage.close()


def test_answer_without_receipt_is_never_overwritten_by_another(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    put(storage)
    with pytest.raises(
        StateError, match=r"has the answer \(3, 2, 1\) .* without a receipt; wait for its receipt before"
    ):
        put(storage, Pending(round=4, step_number=1, attempt=1, samples=40))
    assert whole_answer(storage)
    storage.close()


# --- tries, attempts and outcomes


def test_tries_survive_restarts_and_begin_anew_for_next_answer(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    put(storage)
    assert storage.outbox.tries == 0
    assert [storage.outbox.count_try(), storage.outbox.count_try()] == [1, 2]
    kill(storage)
    again = Storage(tmp_path)
    assert again.outbox.tries == 2
    assert again.outbox.count_try() == 3
    again.outbox.promote(replaced=True)
    put(again)
    assert again.outbox.tries == 0
    again.close()


def test_attempts_are_counted_over_restarts(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert storage.outbox.next_attempt(3, 2) == 1
    for attempt in (1, 2):
        pending = Pending(round=3, step_number=2, attempt=attempt, samples=40)
        put(storage, pending)
        storage.outbox.save_outcome(Outcome(pending, code="checksum"))
        storage.outbox.drop()
        storage.outbox.mark_reported()
        kill(storage)
        storage = Storage(tmp_path)
        assert storage.outbox.next_attempt(3, 2) == attempt + 1
    assert storage.outbox.next_attempt(3, 3) == 1
    assert storage.outbox.next_attempt(4, 2) == 1
    storage.close()


@pytest.mark.parametrize("act", [lambda outbox: outbox.promote(replaced=True), Outbox.drop])
def test_crash_never_hides_outcome_of_answer_from_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Outbox], None]
) -> None:
    """At every moment the answer is still to be settled, or there is something to tell."""
    known = Outcome(PENDING, receipt="r1", tries=2)

    def prepare(storage: Storage) -> None:
        storage.save("state.safetensors", b"old state")
        put(storage)

    def settle(storage: Storage) -> None:
        storage.outbox.save_outcome(known)
        act(storage.outbox)

    result = set()
    for storage in every_crash(tmp_path, monkeypatch, prepare, settle):
        pending = storage.outbox.pending()
        result.add((pending is not None, storage.outbox.outcome() is not None))
        assert pending is not None or storage.outbox.outcome() == known
        storage.close()
    assert result == {(True, False), (True, True), (False, True)}


def test_an_outcome_is_kept_until_it_was_told(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    told = Outcome(Pending(3, 2, 1, 40, Replacement(True), {"test": [[1]]}), "", "late", "too late", {"device": "d"}, 4)
    storage.outbox.save_outcome(told)
    kill(storage)
    again = Storage(tmp_path)
    assert again.outbox.outcome() == told
    again.outbox.mark_reported()
    assert again.outbox.outcome() is None
    again.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"pending": 7}', b'{"pending": {"round": 1}}'])
def test_a_damaged_outcome_tells_nothing_and_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    storage = Storage(tmp_path)
    (tmp_path / "outbox" / "outcome.json").write_bytes(content)
    (tmp_path / "last_outcome.json").write_bytes(content)
    assert storage.outbox.outcome() is None
    assert storage.outbox.next_attempt(1, 1) == 1
    storage.close()


# --- directories of other versions


def test_a_directory_of_a_newer_sdk_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(json.dumps({"device": "d1", "format": FORMAT + 1, "sdk": "9.1.0"}))
    with pytest.raises(StateError) as error:
        make_device(tmp_path)
    assert f"{tmp_path} was written by a newer SDK: it has format {FORMAT + 1}, SDK 9.1.0" in str(error.value)
    assert "update it, or use a new state directory" in str(error.value)
    (tmp_path / "device.json").write_text(json.dumps({"device": "d1", "format": FORMAT}))
    make_device(tmp_path).close()  # the refused one holds no lock


@pytest.mark.parametrize("more", [{"colour": "red"}, {"format": FORMAT + 1}])
def test_an_answer_of_a_newer_sdk_is_refused_and_kept(tmp_path: Path, more: dict[str, Any]) -> None:
    storage = Storage(tmp_path)
    put(storage)
    path = tmp_path / "outbox" / "manifest.json"
    path.write_bytes(sealed_json({**json_object(path, path.read_bytes()), **more}))
    with pytest.raises(StateError, match=r"manifest.json was written by a newer SDK: it has (colour|format 2)"):
        storage.outbox.pending()
    assert path.exists()
    storage.close()


def test_what_this_sdk_does_not_know_of_the_identity_is_kept(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(json.dumps({"device": "d1", "format": FORMAT, "certificate": "later"}))
    storage = Storage(tmp_path)
    storage.save_identity({"device": "d1", "run": "digits"})
    saved = json.loads((tmp_path / "device.json").read_text())
    assert (saved["certificate"], saved["run"], saved["format"]) == ("later", "digits", FORMAT)
    storage.close()


def test_a_file_that_is_deleted_while_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `pinned`, which the app's thread deletes while the device's looks at it."""
    monkeypatch.setattr(Path, "exists", lambda path: True)
    (tmp_path / "file").touch()
    assert Files(tmp_path).load("pinned") is None
    assert Files(tmp_path).load("file/in-no-directory") is None
