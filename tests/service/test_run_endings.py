"""Runs that an operator cancels or deletes, while they are served and while they are not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.answering import AnsweringFleet
from support.processes import COMMAND, children, is_alive, wait_until
from support.secured import device_credentials, make_pki, secured_front
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.wire.payload import ELEMENT_TYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import RunConfig, load_run_config, run_config
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.run_changes import change, delete, roll_back
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.records import Ask, Run
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

RUN = "digits"
FLOAT16 = ELEMENT_TYPES[np.dtype("float16")]


def config() -> RunConfig:
    return run_config({"run": {"name": RUN}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one closed and one open round of a run, each with a payload and an answer; and another run."""
    store = Store.open(tmp_path / "store")
    for name in (RUN, "other"):
        play(store, name)
    store.close()
    return tmp_path / "store"


def play(store: Store, name: str) -> None:
    store.runs.begin(name, {**config().fixed_part(), "run": {**config().fixed_part()["run"], "name": name}})
    store.runs.publish_contract(name, contract_pb2.Contract(run=name, knowledge_type=FLOAT16).SerializeToString())
    store.devices.register(name, "d1", b"hash", b"")
    store.runs.own(name)
    for rows in (1, 2):
        number = store.runs.start_round(name, ["d1"])
        sent, answer = make_payload(rows), make_payload(rows + len(name) * 10)
        for payload in (sent, answer):
            store.blobs.put(payload)
        ask: dict[str, Any] = {"run": name, "round": number, "step_number": 1, "device": "d1", "step": "train"}
        ask |= {"expects": {}, "payload": sent.sha256, "payload_bytes": 1, "seed": 1, "deadline_at": 1e12}
        store.asks.add([Ask(**ask)])
        asked = store.asks.get(name, number, 1, "d1")
        assert asked is not None
        store.asks.accept_upload(asked.id, 1, answer.sha256, 10, 1)
        if rows == 1:
            store.runs.close_round(name, number, store.blobs.put_state(name.encode()), [asked.id], {})


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    opened = Store.open(directory)
    yield opened
    opened.close()


def row_of(store: Store, name: str = RUN) -> Run:
    return store.runs.existing(name)


def files(directory: Path) -> set[str]:
    return {path.stem for path in (directory / "blobs").rglob("*.safetensors")}


def call(directory: Path, *arguments: str, typed: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", *arguments, "--store", str(directory)], input=typed)
    return result.exit_code, result.output


def cancel(store: Store, run: str) -> str:
    return change(store, run, RunStatus.CANCELLED).status


# --- cancelling


def test_a_cancelled_run_is_over_for_good(store: Store) -> None:
    token = store.runs.own(RUN)
    assert cancel(store, RUN) == "cancelled"
    assert (row_of(store).status, row_of(store).reason) == ("cancelled", "by the operator, after 1 round")
    assert [(row.status, row.reason) for row in store.runs.rounds(RUN)][1:] == [("short", "run cancelled")]
    assert [row.status for row in store.asks.uploads(RUN)] == ["used", "reported"]
    with pytest.raises(RunError, match="run 'digits' was cancelled"):
        store.runs.assert_owner(RUN, token)
    with pytest.raises(RunError, match="run 'digits' was cancelled"):
        store.runs.own(RUN)
    with pytest.raises(RunError, match="run 'digits' was cancelled; give the next run another name, or delete this"):
        register(store, config())


def test_cancelling_again_changes_nothing(store: Store) -> None:
    assert cancel(store, RUN) == "cancelled"
    before = row_of(store), store.runs.rounds(RUN)
    assert cancel(store, RUN) == "cancelled"
    assert (row_of(store), store.runs.rounds(RUN)) == before
    store.runs.set_status("other", RunStatus.FINISHED, "")
    assert cancel(store, "other") == "finished"
    assert row_of(store, "other").status == "finished"
    with pytest.raises(ConfigurationError, match="there is no run 'none'"):
        cancel(store, "none")


def test_devices_of_a_cancelled_run_are_sent_home(store: Store) -> None:
    api = DeviceApi(store)
    identity = service_pb2.Identity(device="d2")
    identity.run = RUN
    profile = contract_pb2.DeviceProfile(knowledge_types=[FLOAT16], samples=1)
    identity.secret = api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile)).secret
    assert api.next_ask(identity) is None
    cancel(store, RUN)
    told = api.next_ask(identity)
    assert told is not None
    assert told.finished == "cancelled: by the operator, after 1 round"


def test_the_command_cancels(directory: Path) -> None:
    assert call(directory, "cancel", RUN, "--yes") == (0, "run 'digits' is cancelled\n")
    assert call(directory, "cancel", RUN, typed="y")[1].endswith("run 'digits' is cancelled\n")
    code, said = call(directory, "list", "--json")
    assert (code, [row["status"] for row in json.loads(said)]) == (0, ["cancelled", "running (no server)"])
    code, said = call(directory, "cancel", "digist")
    assert (code, said) == (
        1,
        "error: there is no run 'digist'; did you mean 'digits'? Runs in the store: digits, other\n",
    )


@pytest.mark.parametrize("typed", ["n", ""])
def test_cancelling_asks_first(directory: Path, store: Store, typed: str) -> None:
    code, said = call(directory, "cancel", RUN, typed=typed)
    assert said.startswith("It is running (no server) and has 1 completed round. Cancel run 'digits'? It cannot be")
    assert "error: not confirmed, so nothing was changed; --yes confirms it" in said
    assert (code, row_of(store).status) == (1, "running")


def test_remote_operator_cancels_and_viewer_does_not(tmp_path: Path, store: Store) -> None:
    authority = make_pki(tmp_path / "pki")
    for role in (Role.OPERATOR, Role.VIEWER):
        authority.issue_person(role, "olga", 1.0, tmp_path / role)
    identity = service_pb2.Identity(run=RUN, device="d2")
    profile = contract_pb2.DeviceProfile(knowledge_types=[FLOAT16], samples=1)
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        there = ["--server", f"127.0.0.1:{front.port}", "--identity"]

        def cancels(role: Role, run: str, yes: Sequence[str] = ("--yes",)) -> tuple[int, str]:
            result = CliRunner().invoke(app, ["runs", "cancel", run, *yes, *there, str(tmp_path / role)])
            return result.exit_code, result.output

        with front.channel(device_credentials(authority, "d2")) as channel:
            device = service_pb2_grpc.DeviceServiceStub(channel)
            checked_in = device.CheckIn(service_pb2.CheckInRequest(identity=identity, profile=profile))
            identity.secret = checked_in.secret
            store.devices.ask_to_forget(RUN, "d1")
            code, said = cancels(Role.OPERATOR, RUN)
            assert (code, row_of(store).status) == (1, "running"), "nobody would forget d1 any more"
            assert "still has devices to forget; try again after the run's next round, or cancel it on the" in said
            store.devices.mark_forgotten(RUN, "d1")
            code, said = cancels(Role.VIEWER, RUN)
            assert "viewer 'olga' may not change a run" in said
            assert (code, row_of(store).status) == (1, "running")
            code, said = cancels(Role.OPERATOR, RUN, yes=())
            assert (code, row_of(store).status) == (1, "running"), "nobody has confirmed it"
            assert cancels(Role.OPERATOR, RUN) == (0, "run 'digits' is cancelled\n")
            told = device.NextAsk(service_pb2.NextAskRequest(identity=identity))
            assert told.finished == "cancelled: by the operator, after 1 round"
        before = row_of(store), store.runs.rounds(RUN)
        assert before[0].status == "cancelled"
        assert [row.status for row in before[1]] == ["closed", "short"]
        assert cancels(Role.OPERATOR, RUN) == (0, "run 'digits' is cancelled\n")
        assert (row_of(store), store.runs.rounds(RUN)) == before
        code, said = cancels(Role.OPERATOR, "digist")
        assert (code, "there is no run 'digist'; did you mean 'digits'?" in said) == (1, True)
        assert row_of(store, "other").status == "running"


# --- deleting


@pytest.mark.parametrize("status", ["preparing", "running", "stopped", "finished", "cancelled"])
def test_a_run_is_deleted_in_any_state_with_its_files(directory: Path, store: Store, status: str) -> None:
    whole = files(directory)
    store.runs.set_status(RUN, RunStatus(status), "")
    gone = delete(directory, store, RUN)
    assert gone is not None
    assert (gone.rounds, gone.freed.payloads) == (2, 3), "two answers and the checkpoint; the other run has the asks'"
    assert store.runs.names() == ["other"]
    assert len(whole - files(directory)) == 3
    assert files(directory) == {row.hex() for row in store.runs.payloads_between("other", 0, 9)} | {
        row_of(store, "other").checkpoint.hex()
    }
    assert not [*store.devices.all(RUN), *store.runs.rounds(RUN), *store.asks.uploads(RUN)]
    assert delete(directory, store, RUN) is None
    register(store, config())
    assert row_of(store).completed_rounds == 0


def test_a_run_that_is_served_is_not_deleted_and_others_are(directory: Path, store: Store) -> None:
    with serve_lock.take(directory, RUN):
        with pytest.raises(RunError, match="run 'digits' is being served; stop its server first, or only end the run"):
            delete(directory, store, RUN)
        assert store.runs.get(RUN) is not None
    with serve_lock.take(directory, "other"):
        gone = delete(directory, store, RUN)
    assert store.runs.names() == ["other"]
    assert gone is not None
    assert (gone.freed.payloads, gone.later.payloads) == (0, 3), "young files are left to the server's sweeps"


def test_nobody_serves_a_store_while_a_run_is_deleted(directory: Path) -> None:
    with serve_lock.without_server(directory) as served:
        assert served is None
        with pytest.raises(RunError, match="another `fleetdistill serve` uses the store"):
            serve_lock.take(directory, RUN)
    serve_lock.take(directory, RUN).close()


def test_the_command_asks_before_it_deletes(directory: Path) -> None:
    question = "Delete run 'digits' with its model, receipts and figures? [y/N]: "
    question = f"It is running (no server) and has 1 completed round. {question}"
    code, said = call(directory, "delete", RUN, typed="n\n")
    assert code == 1
    assert said.startswith(question)
    code, said = call(directory, "delete", RUN, typed="y\n")
    assert code == 0
    assert said.startswith(f"{question}y\nrun 'digits' is deleted: 2 rounds, 0 events, 0 figures, 3 payloads (")
    code, said = call(directory, "delete", RUN)
    assert (code, said) == (0, "there is no run 'digits'; nothing to delete\n")
    for _ in range(2):
        code, said = call(directory, "delete", "digts")
        assert (code, said) == (1, "error: there is no run 'digts'; runs in the store: other\n"), "a mistake"
    code, said = call(directory, "delete", "other", "--yes")
    assert (code, files(directory)) == (0, set())


@pytest.mark.parametrize("point", ["engine.gc.before-drop", "engine.gc.after-drop"])
def test_a_deletion_that_is_killed_is_finished_by_the_next(directory: Path, point: str) -> None:
    killed = subprocess.run(
        [*COMMAND, "runs", "delete", RUN, "--yes", "--store", str(directory)],
        env={**os.environ, "FLEETDISTILL_FAILPOINTS": f"{point}=kill@2"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL
    store = Store.open(directory)
    assert store.runs.names() == ["other"], "the rows had gone"
    assert len(files(directory)) > 5
    delete(directory, store, RUN)
    assert len(files(directory)) == 5, "two asks, two answers and the checkpoint of the other run"
    store.close()


# --- rolling back


def test_a_run_is_rolled_back_beside_a_server_of_others(directory: Path, store: Store) -> None:
    assert roll_back(directory, store, RUN, 1, "ada") == RolledBack(completed_rounds=1, undone=0)
    store.runs.set_status("other", RunStatus.STOPPED, "by the operator")
    with serve_lock.take(directory, ""):
        assert roll_back(directory, store, "other", 1, "ada").completed_rounds == 1


# --- beside a server


RUN_TOML = """
[run]
name = "digits"
method = "feddkc"
rounds = 1000000
[contract]
classes = 10
input_shape = [1, 8, 8]
[method]
server_epochs = 1
[server]
listen = "127.0.0.1:0"
store = "{store}"
torch_device = "cpu"
"""


@pytest.mark.slow
def test_a_run_that_is_served_is_cancelled_and_its_devices_go(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML.format(store=tmp_path / "store"))
    supervisor = Supervisor(load_run_config(path), log=tmp_path / "server.log")
    told: list[str] = []
    ended: list[bool] = []
    serving = threading.Thread(target=lambda: ended.append(supervisor.serve(on_over=told.append)), name="serving")
    serving.start()
    store = Store.open(tmp_path / "store")
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        stack.callback(serving.join)
        stack.callback(supervisor.stop)
        port = wait_until(lambda: supervisor.port or 0, "the front to listen")
        stack.enter_context(AnsweringFleet(port, RUN, 2))
        wait_until(lambda: row_of(store).completed_rounds > 0, "a round")
        (engine,) = children(os.getpid(), "fleetdistill_server.engine")
        assert cancel(store, RUN) == "cancelled"
        wait_until(lambda: not is_alive(engine), "the engine to end")
        wait_until(lambda: told, "the supervisor to tell")
    assert (told, ended) == (["cancelled"], [True])
    assert row_of(Store.open(tmp_path / "store")).status == "cancelled"
