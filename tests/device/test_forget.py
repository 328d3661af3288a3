"""A device and its directory: what is in it, also while it runs, and how it is erased here and at the server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device.sdk_fleet import RUN, Fleet, make_device
from support.forked import forked_device_forget
from support.open_device import open_device
from support.private_fleet import PrivateFleet, RowsWorker
from support.processes import module_path, python
from typer.testing import CliRunner

from fleetdistill import Budgets, Deployment
from fleetdistill.device.command import main
from fleetdistill.device.inspection import inspect
from fleetdistill.errors import ConfigurationError, DeviceClosedError, LinkError, RefusedError, StateError
from fleetdistill.state.own_files import check_can_be_state, own_files
from fleetdistill.testing import EventLog, FaultyLink, lost, refused
from fleetdistill_server.cli.app import app
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store


@pytest.fixture
def used(fleet: Fleet, tmp_path: Path) -> Path:
    """The directory of a device that has answered once."""
    fleet.ask("d")
    with make_device(fleet, tmp_path / "state") as device:
        device.step(0)
    return tmp_path / "state"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- inspect


def test_inspect_shows_identity_model_rounds_and_what_was_sent(fleet: Fleet, used: Path) -> None:
    before = contents(used)
    result = inspect(used)
    assert (result.device, result.run, result.model) == ("d", RUN, "2 Linear")
    assert (result.samples, result.rounds, result.last_round, result.waiting) == (24, 1, 1, None)
    assert result.last_receipt == fleet.store.asks.uploads(RUN)[0].receipt
    assert result.ledger.totals.messages == {"answer": 1, "check-in": 1}
    assert len(bytes.fromhex(result.data_version)) == 16
    assert (result.damage, result.set_aside, result.erasing) == ([], [], False)
    assert contents(used) == before


def test_inspect_works_while_the_device_runs_and_an_answer_waits(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=FaultyLink(MemoryLink(fleet.api), lost("upload"))) as device:
        with pytest.raises(LinkError):
            device.step(0)
        result = inspect(tmp_path)
        assert result.waiting == (1, 1, 1)
        assert result.ledger.entries[-1].outcome == "may have been sent"
        device.step(0)
    assert inspect(tmp_path).waiting is None


@pytest.mark.parametrize("name", ["device.json", "profile.bin", "ledger.jsonl", "privacy.json", "last_outcome.json"])
def test_inspect_of_a_damaged_directory_shows_the_rest(used: Path, name: str) -> None:
    (used / name).write_bytes(b"\xff{")
    result = inspect(used)
    assert any(name in text for text in result.damage) or name == "last_outcome.json"
    assert result.files["state.safetensors"] > 0


@pytest.mark.parametrize(
    "name", ["state.safetensors", "delivered.safetensors", "model.onnx", "deployed.json", "usage.json", "pace.json"]
)
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "changed"])
def test_inspect_lists_every_damaged_file(fleet: Fleet, tmp_path: Path, name: str, cut: bool) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, budgets=Budgets(bytes_per_day=1 << 30), export="round") as device:
        device.step(0)
        fleet.ask("d")
        device.step(0)
    (tmp_path / "pace.json").write_bytes(b'{"format": 1, "not_before": 0, "seconds": 0}')
    assert inspect(tmp_path).damage == []
    data = (tmp_path / name).read_bytes()
    half = len(data) // 2
    (tmp_path / name).write_bytes(data[:half] if cut else data[:half] + b"\xff" + data[half + 1 :])
    (text,) = inspect(tmp_path).damage
    assert text.startswith(f"{tmp_path / name} is damaged: ")


def test_inspect_shows_withdrawn_columns_as_not_allowed(fleet: Fleet, used: Path) -> None:
    assert "logits" in inspect(used).allowed
    with make_device(fleet, used) as device:
        device.allow = ("features",)
        with pytest.raises(RefusedError):
            device.step(0)
    assert inspect(used).allowed == ["features"]


def test_a_device_that_may_not_forget_can_still_erase(fleet: Fleet, used: Path) -> None:
    """A revoked one: its operator deletes at the server, and the app what is here."""
    link = FaultyLink(MemoryLink(fleet.api), refused("leave", "revoked"))
    with make_device(fleet, used, link=link) as device:
        with pytest.raises(RefusedError, match=r"; nothing was erased\. To erase this device's files only: forget\(lo"):
            device.forget()
        assert (used / "device.json").exists()
        device.forget(local=True)
    assert not (used / "device.json").exists()


def test_inspect_of_another_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StateError, match="is not the state directory of a device"):
            inspect(path)


def test_the_command_prints_a_page_or_json(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(used)]) == 0
    text = capsys.readouterr().out
    assert "d, run sdk" in text
    assert "features, labels, logits, metrics received" in text
    assert main(["inspect", str(used), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ledger"]["entries"][1]["columns"] == {
        "knowledge": ["features", "logits", "labels"],
        "metrics": ["metrics"],
    }
    assert result["totals"]["receipts"] == 1
    assert main(["inspect", str(used / "outbox")]) == 1
    assert "error: " in capsys.readouterr().err


def test_the_command_ends_quietly_when_its_reader_has_ended(used: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fleetdistill.device", "inspect", str(used)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, **module_path()})
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("options", [["--local"], ["--server", "127.0.0.1:1"]])
def test_forgetting_device_that_never_checked_in_needs_no_server(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    make_device(fleet, tmp_path, run="").close()
    assert main(["forget", str(tmp_path), *options, "--yes"]) == 0
    text = capsys.readouterr().out
    assert "the device has never checked in: no server has its data" in text
    assert "RUN" not in text


def test_the_command_needs_nothing_but_the_sdk(used: Path) -> None:
    """Neither the server package nor its dependencies, nor torch: they are made impossible to import."""
    block = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('typer', 'pydantic', 'torch', 'sqlite_utils', 'rich', 'safetensors', 'onnx'):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
"""
    run = f"sys.argv = ['fleetdistill', 'device', 'inspect', {str(used)!r}, '--json']"
    script = f"{block}\n{run}\nfrom fleetdistill_server.start import main\nmain()"
    assert json.loads(python(script))["device"] == "d"


def test_the_servers_command_line_lists_the_same_command(used: Path) -> None:
    result = CliRunner().invoke(app, ["device", "inspect", str(used), "--json", "--entries", "3"])
    assert json.loads(result.stdout)["run"] == RUN


# --- forget


def test_forgotten_device_erases_itself_and_asks_server(fleet: Fleet, used: Path) -> None:
    device = make_device(fleet, used)
    device.step(0)
    inputs = np.zeros((1, 4), np.float32)
    device.predict(inputs)
    assert device.model is not None
    assert device.forget() is True
    with pytest.raises(DeviceClosedError):
        device.predict(inputs)
    assert contents(used) == {"lock": b""}
    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    assert row.forget_asked_at is not None
    assert fleet.store.devices.to_forget(RUN) == ["d"]
    assert [event.kind for event in fleet.store.history.events(RUN, "forget-requested")] == ["forget-requested"]


def test_the_request_is_authenticated(fleet: Fleet, used: Path, tmp_path: Path) -> None:
    stranger = make_device(fleet, tmp_path / "other")
    with stranger:
        for refused in (lambda: stranger.step(0), stranger.forget):
            with pytest.raises(RefusedError):
                refused()
    assert fleet.store.devices.to_forget(RUN) == []
    assert (tmp_path / "other" / "device.json").exists()


def test_a_device_that_the_server_does_not_know_is_erased(fleet: Fleet, tmp_path: Path) -> None:
    device = make_device(fleet, tmp_path, device_id="new")
    assert device.forget() is True
    assert contents(tmp_path) == {"lock": b""}


@pytest.mark.parametrize("lacks", ["the run", "the device"])
def test_a_server_without_the_device_erases_nothing(used: Path, lacks: str) -> None:
    """It is not the one that has its data."""
    api = Fleet().api if lacks == "the device" else DeviceApi(Store.in_memory())
    before = contents(used)
    device = make_device(Fleet(), used, link=MemoryLink(api), device_id=None)
    with pytest.raises(RefusedError, match=r"does not know the device: .*Nothing was erased\. .*forget\(local=True\)"):
        device.forget()
    device.close(leave=False)
    assert contents(used) == before


def test_the_address_kept_is_that_of_the_server_that_accepted(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apis = {"127.0.0.1:1": fleet.api, "127.0.0.1:2": DeviceApi(Store.in_memory()), "127.0.0.1:3": fleet.api}
    monkeypatch.setattr("fleetdistill.device.device.open_link", lambda server, *_: MemoryLink(apis[server]))
    kept = []
    for server in apis:
        with make_device(fleet, tmp_path, link=server) as device:
            with contextlib.suppress(RefusedError):
                device.step(0)
            kept.append(json.loads((tmp_path / "device.json").read_text())["server"])
    assert kept == ["127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:3"]


def test_a_device_that_never_called_a_server_needs_none(fleet: Fleet, tmp_path: Path) -> None:
    device = make_device(fleet, tmp_path, link=FaultyLink(MemoryLink(fleet.api), lost("leave")))
    assert device.forget() is True
    assert contents(tmp_path) == {"lock": b""}


def test_without_its_server_nothing_is_erased(fleet: Fleet, used: Path) -> None:
    before = contents(used)
    device = make_device(fleet, used, link=FaultyLink(MemoryLink(fleet.api), lost("leave")))
    with pytest.raises(LinkError, match=r"nothing was erased: .* only erase with forget\(local=True\)"):
        device.forget()
    assert contents(used) == before
    assert device.forget() is True


def test_a_local_erasure_calls_no_server(fleet: Fleet, used: Path) -> None:
    device = make_device(fleet, used, link=FaultyLink(MemoryLink(fleet.api), lost("leave")))
    assert device.forget(local=True) is False, "the server still has the device's data"
    assert contents(used) == {"lock": b""}
    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    assert row.forget_asked_at is None


def test_an_earlier_server_does_not_confirm(fleet: Fleet, used: Path) -> None:
    class Earlier(MemoryLink):
        def leave(self, identity: Any, *, forget: bool = False) -> bool:
            return super().leave(identity)

    assert make_device(fleet, used, link=Earlier(fleet.api)).forget() is False
    assert contents(used) == {"lock": b""}


def test_a_forgotten_directory_makes_a_new_device(fleet: Fleet, used: Path) -> None:
    make_device(fleet, used).forget()
    with make_device(fleet, used, device_id=None) as device:
        assert device.device_id != "d"
        device.step(0)
        assert [entry.kind for entry in device.ledger.entries] == ["check-in"]


def test_a_private_release_stays_spent(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    given: dict[str, Any] = {"worker": RowsWorker, "export": "never"}
    events = EventLog()
    for name in ("first", "second"):
        device = open_device(
            server=MemoryLink(fleet.api), state_dir=tmp_path, device_id=name, on_event=events.append, **given
        )
        device.step(0)
        fleet.ask(name)
        device.step(0)
        device.forget()
        assert set(contents(tmp_path)) == {"lock", "privacy.json"}
    assert [event.text for event in events if event.kind == "dropped"] == ["privacy budget used up"]
    assert inspect_releases(tmp_path) == 1


def inspect_releases(directory: Path) -> int:
    return len(json.loads((directory / "privacy.json").read_text())["releases"])


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after-mark", "after-files"])
def test_device_killed_while_erasing_completes_it_at_next_start(fleet: Fleet, used: Path, point: str) -> None:
    """At `device.forget.after-mark` all files are there, at `device.forget.after-files` none."""
    dying = forked_device_forget(used)
    dying.start(f"device.forget.{point}=kill")
    assert dying.process is not None
    dying.process.join(60)
    assert dying.was_killed
    assert inspect(used).erasing
    with make_device(fleet, used, device_id=None) as device:
        assert device.device_id != "d"
        assert not (used / "state.safetensors").exists()
    assert not inspect(used).erasing


def test_the_command_erases_and_names_the_operators_command(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(used)
    assert main(["forget", str(used), "--local"]) == 1, "nobody agreed"
    assert contents(used) == before
    assert main(["forget", str(used), "--yes"]) == 1
    assert "names no server; pass --server HOST:PORT, or --local" in capsys.readouterr().err, "its app passed a link"
    assert contents(used) == before
    assert main(["forget", str(used), "--local", "--yes"]) == 0
    assert f"fleetdistill devices forget {RUN} d" in capsys.readouterr().out
    assert contents(used) == {"lock": b""}


def test_the_command_refuses_a_folder_that_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    assert main(["forget", str(tmp_path / "photos"), "--yes"]) == 1
    assert (tmp_path / "photos" / "a.jpg").exists()


def test_the_command_refuses_a_directory_in_use(fleet: Fleet, used: Path) -> None:
    with make_device(fleet, used):
        assert main(["forget", str(used), "--local", "--yes"]) == 1
    assert (used / "device.json").exists()


FOREIGN = ("thesis.txt", "photos/a.jpg", "versions/old/model.onnx", "outbox/letter.txt", "export/notes.txt", "b.onnx")
"""Names of a user's own files, some in folders with the SDK's names."""


def test_only_the_sdks_own_files_are_erased(used: Path) -> None:
    ours = ("versions/1/own.onnx", "tls/ca.pem.new", "outbox.damaged-1/data.bin", "export.new/a/.b.tmp", "x.onnx")
    (used / "deployed.json").write_text(json.dumps({"number": 1, "files": ["x.onnx", "../y.onnx"]}))
    for name in (*FOREIGN, *ours):
        (used / name).parent.mkdir(parents=True, exist_ok=True)
        (used / name).write_bytes(b"x")
    assert main(["forget", str(used), "--local", "--yes"]) == 0
    assert set(contents(used)) == {"lock", *FOREIGN}
    assert {path.name for path in used.iterdir() if path.is_dir()} == {"photos", "versions", "outbox", "export"}


def test_every_file_of_a_device_is_known(fleet: Fleet, used: Path) -> None:
    with make_device(fleet, used, export="finish", deployment=Deployment(keep_versions=3)) as device:
        fleet.ask("d")
        device.step(0)
    names = set(contents(used))
    assert {"device.json", "deployed.json"} <= names
    assert {str(path.relative_to(used)) for path in own_files(used)} == names


def test_folder_of_other_files_does_not_become_state_directory(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(StateError, match="contains 'photos' and 1 more, which is not a device's; pass an"):
        make_device(fleet, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "thesis.txt"}
    with pytest.raises(StateError, match=r"thesis.txt' is a file, expected a directory for this device alone"):
        make_device(fleet, tmp_path / "thesis.txt")


@pytest.mark.parametrize("given", ["", " ", 3, None])
def test_a_state_directory_without_a_path_is_refused(fleet: Fleet, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected the path of a directory for this device alone"):
        make_device(fleet, given)


@pytest.mark.parametrize("name", [".gitkeep", "lost+found", "lock", "privacy.json"])
def test_hidden_files_and_remains_of_a_device_are_no_obstacle(fleet: Fleet, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_can_be_state(tmp_path)


def test_the_question_names_the_device_and_the_directory(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")  # type: ignore[func-returns-value]
    monkeypatch.chdir(used)
    assert main(["forget", ".", "--local"]) == 1
    assert asked == [f"Erase device d in {used} permanently? [y/N] "]
    assert (used / "device.json").exists()


# --- another machine


def test_a_directory_moves_to_another_path(fleet: Fleet, used: Path, tmp_path: Path) -> None:
    """An answer that waits is sent from there, with the same id; and no file names a place of the old machine."""
    first = make_device(fleet, used, link=FaultyLink(MemoryLink(fleet.api), lost("upload")))
    first.step(0)
    fleet.ask("d")
    with pytest.raises(LinkError):
        first.step(0)
    first.close(leave=False)
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(used, moved)
    shutil.rmtree(used)
    assert not any(str(tmp_path).encode() in data for data in contents(moved).values())
    with make_device(fleet, moved, device_id=None) as device:
        device.step(0)
        assert device.device_id == "d"
        assert [entry.outcome for entry in device.ledger.entries if entry.kind == "answer"] == ["received", "received"]
    assert len(fleet.store.asks.uploads(RUN)) == 2
