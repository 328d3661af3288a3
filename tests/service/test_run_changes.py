"""What an operator does with runs, and what it does to their engines: the rows of the store, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.wire_samples import make_payload

from fleetdistill.errors import ConfigurationError, FleetDistillError, RunError, StoreError
from fleetdistill.wire.payload import ELEMENT_TYPES
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.operator_log import local_log, local_user
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.service import run_changes, supervisor
from fleetdistill_server.service.run_changes import RunState, delete
from fleetdistill_server.service.supervisor import CallLog
from fleetdistill_server.store.operator_calls import LOCAL, Call, Outcome
from fleetdistill_server.store.records import Ask, Run
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

RUN = "digits"
FLOAT16 = ELEMENT_TYPES[np.dtype("float16")]


def config(name: str = RUN, **run: Any) -> RunConfig:
    return run_config({"run": {"name": name, **run}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    yield opened
    opened.close()


def row_of(store: Store, name: str = RUN) -> Run:
    return store.runs.existing(name)


def queue(store: Store) -> list[str]:
    return [row.name for row in store.run_control.queue()]


def begin(store: Store, **run: Any) -> str:
    """A started run with a contract and an engine, whose token this returns."""
    run_changes.create(store, config(**run), start_it=True)
    store.runs.publish_contract(RUN, contract_pb2.Contract(run=RUN, knowledge_type=FLOAT16).SerializeToString())
    token = store.run_control.assign(RUN)
    assert token is not None
    return token


def ask_one(store: Store) -> int:
    """An open round with an open ask."""
    store.devices.register(RUN, "d1", b"hash", b"")
    number = store.runs.start_round(RUN, ["d1"])
    ask: dict[str, Any] = {
        "run": RUN,
        "round": number,
        "step_number": 1,
        "device": "d1",
        "step": "train",
        "expects": {},
    }
    deadline = store.asks.clock.now() + 60
    payload = make_payload(1)
    store.blobs.put(payload)
    sent: dict[str, Any] = {"payload": payload.sha256, "payload_bytes": 1, "seed": 1, "deadline_at": deadline}
    store.asks.add([Ask(**ask, **sent)])
    return number


# --- from one status to the next

ACTIONS: dict[str, Callable[[Store], RunState]] = {
    "create": lambda store: run_changes.create(store, config()),
    "create --start": lambda store: run_changes.create(store, config(), start_it=True),
    "start": lambda store: run_changes.change(store, RUN, RunStatus.RUNNING),
    "pause": lambda store: run_changes.change(store, RUN, RunStatus.PAUSED),
    "stop": lambda store: run_changes.change(store, RUN, RunStatus.STOPPED),
    "cancel": lambda store: run_changes.change(store, RUN, RunStatus.CANCELLED),
}
STATUS = {
    "create": "created",
    "create --start": "preparing",
    "start": "preparing",
    "pause": "paused",
    "stop": "stopped",
    "cancel": "cancelled",
}
BEFORE: dict[str, list[list[str]]] = {
    "create": [[]],
    "create --start": [[]],
    "start": [["create"], ["create --start", "pause"], ["create --start", "stop"]],
    "pause": [["create --start"]],
    "stop": [["create"], ["create --start"], ["create --start", "pause"]],
    "cancel": [["create"], ["create --start"], ["create --start", "pause"], ["create --start", "stop"]],
}
"""What can have happened to the run before."""
CASES = [(action, before) for action, all_before in BEFORE.items() for before in all_before]


@pytest.mark.parametrize(("action", "before"), CASES)
def test_repeated_action_changes_nothing(store: Store, action: str, before: list[str]) -> None:
    for earlier in before:
        ACTIONS[earlier](store)
    state = ACTIONS[action](store)
    after = row_of(store), store.history.events(RUN)
    assert (state.run, state.status) == (RUN, after[0].status) == (RUN, STATUS[action])
    assert ACTIONS[action](store) == state
    assert (row_of(store), store.history.events(RUN)) == after


def test_a_creation_repeated_after_the_run_starts_nothing(store: Store) -> None:
    run_changes.create(store, config(rounds=1), start_it=True)
    store.runs.close_round(RUN, store.runs.start_round(RUN, ["d1"]), b"", [], {})
    store.runs.set_status(RUN, RunStatus.FINISHED, "all rounds done")
    assert run_changes.create(store, config(rounds=1), start_it=True).status == "finished"
    assert [event.kind for event in store.history.events(RUN)].count("started") == 1


@pytest.mark.parametrize("action", ["pause", "stop"])
def test_an_engine_whose_run_is_taken_from_it_can_commit_nothing(store: Store, action: str) -> None:
    token = begin(store)
    store.runs.assert_owner(RUN, token)
    ACTIONS[action](store)
    with pytest.raises(RunError):
        store.runs.assert_owner(RUN, token)
    assert store.run_control.assign(RUN) is None, "nor does it get a new one"


def test_engine_of_deleted_run_commits_nothing_even_if_recreated(store: Store, tmp_path: Path) -> None:
    token = begin(store)
    delete(tmp_path / "store", store, RUN)
    run_changes.create(store, config(), start_it=True)
    with pytest.raises(RunError):
        store.runs.assert_owner(RUN, token)


def test_runs_wait_in_the_order_of_their_last_start(store: Store) -> None:
    for name in ("c", "b", "a"):
        run_changes.create(store, config(name), start_it=name != "b")
    assert queue(store) == ["c", "a"]
    run_changes.change(store, "b", RunStatus.RUNNING)
    assert queue(store) == ["c", "a", "b"]
    run_changes.change(store, "c", RunStatus.PAUSED)
    assert queue(store) == ["a", "b"]
    run_changes.change(store, "c", RunStatus.RUNNING)
    assert queue(store) == ["a", "b", "c"]
    store.runs.set_status("a", RunStatus.FINISHED, "")
    assert queue(store) == ["b", "c"]


def test_failed_run_is_stopped_only_by_own_engine_and_restarted(store: Store) -> None:
    token = begin(store)
    assert not store.run_control.stop_failed(RUN, "another", "the engine failed")
    assert store.run_control.stop_failed(RUN, token, "the engine failed")
    assert (row_of(store).status, row_of(store).reason) == ("stopped", "the engine failed")
    assert queue(store) == []
    assert run_changes.change(store, RUN, RunStatus.RUNNING).sentence == "run 'digits' is started"
    assert (row_of(store).status, row_of(store).reason, queue(store)) == ("running", "", [RUN])


# --- rounds, asks and devices


def test_a_pause_keeps_the_open_round_and_extends_its_deadlines(store: Store) -> None:
    begin(store)
    ask_one(store)
    (before,) = store.asks.all_open(RUN)
    run_changes.change(store, RUN, RunStatus.PAUSED)
    paused_at = row_of(store).paused_at
    assert paused_at is not None
    store.database.now = lambda: paused_at + 1000.0
    run_changes.change(store, RUN, RunStatus.RUNNING)
    assert store.runs.open_number(RUN) == 1
    store.run_control.assign(RUN)
    (after,) = store.asks.all_open(RUN)
    assert after.deadline_at - before.deadline_at == pytest.approx(1000.0)
    store.run_control.assign(RUN)
    assert store.asks.all_open(RUN)[0].deadline_at == after.deadline_at, "once"


def test_a_stop_closes_the_open_round_and_reports_its_answers(store: Store) -> None:
    begin(store)
    number = ask_one(store)
    asked = store.asks.get(RUN, number, 1, "d1")
    assert asked is not None
    answer = make_payload(2)
    store.blobs.put(answer)
    store.asks.accept_upload(asked.id, 1, answer.sha256, 10, 1)
    run_changes.change(store, RUN, RunStatus.STOPPED)
    assert [(row.status, row.reason) for row in store.runs.rounds(RUN)] == [("short", "run stopped")]
    assert [(row.status, row.reason) for row in store.asks.uploads(RUN)] == [("reported", "round short: run stopped")]


def test_devices_of_paused_run_wait_and_begun_work_is_accepted(store: Store) -> None:
    api = DeviceApi(store)
    begin(store)
    identity = service_pb2.Identity(run=RUN, device="d1")
    profile = contract_pb2.DeviceProfile(samples=1, knowledge_types=[FLOAT16])
    identity.secret = api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile)).secret
    ask_one(store)
    result = api.next_ask(identity)
    assert result is not None
    assert result.ask.round == 1
    run_changes.change(store, RUN, RunStatus.PAUSED)
    assert api.next_ask(identity) is None, "it waits, with its ask still open"
    name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
    status = api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name))
    assert status.ask_open
    run_changes.change(store, RUN, RunStatus.RUNNING)
    again = api.next_ask(identity)
    assert again is not None
    assert again.ask.round == 1


# --- refusals


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(FleetDistillError) as error:
        act()
    return str(error.value)


def test_what_is_not_possible_is_a_sentence_and_changes_nothing(store: Store) -> None:
    run_changes.create(store, config())
    before = row_of(store)
    assert (
        refusal(lambda: run_changes.change(store, RUN, RunStatus.PAUSED))
        == "run 'digits' is created, so it cannot be paused"
    )
    assert row_of(store) == before
    run_changes.change(store, RUN, RunStatus.RUNNING)
    run_changes.change(store, RUN, RunStatus.PAUSED)
    run_changes.change(store, RUN, RunStatus.RUNNING)
    store.runs.set_status(RUN, RunStatus.FINISHED, "")
    assert "is finished; raise [run] rounds" in refusal(lambda: run_changes.change(store, RUN, RunStatus.RUNNING))
    for status in (RunStatus.STOPPED, RunStatus.CANCELLED):
        assert run_changes.change(store, RUN, status).sentence == "run 'digits' is finished"
    for status in (RunStatus.RUNNING, RunStatus.PAUSED, RunStatus.STOPPED, RunStatus.CANCELLED):
        with pytest.raises(ConfigurationError, match=r"there is no run 'digist'; did you mean 'digits'\?"):
            run_changes.change(store, "digist", status)
    text = "status is 'preparing', must be running, paused, stopped, cancelled"
    assert refusal(lambda: run_changes.change(store, RUN, "preparing")) == text


def test_run_is_created_again_only_with_changeable_settings(store: Store) -> None:
    run_changes.create(store, config(rounds=3))
    assert run_changes.create(store, config(rounds=5)).status == "created"
    assert (store.run_control.setup(RUN) or {})["run"]["rounds"] == 5
    assert "exists with another configuration: run.seed was 0, is 7" in refusal(
        lambda: run_changes.create(store, config(rounds=5, seed=7))
    )
    assert (store.run_control.setup(RUN) or {})["run"]["seed"] == 0


def test_a_finished_run_with_more_rounds_waits_to_be_started(store: Store) -> None:
    begin(store, rounds=1)
    store.runs.close_round(RUN, store.runs.start_round(RUN, ["d1"]), b"checkpoint", [], {})
    store.runs.set_status(RUN, RunStatus.FINISHED, "1 round completed")
    run_changes.create(store, config(rounds=1))
    assert row_of(store).status == "finished"
    run_changes.create(store, config(rounds=40))
    assert (row_of(store).status, row_of(store).reason) == ("stopped", "finished, and now has 40 rounds")
    run_changes.change(store, RUN, RunStatus.RUNNING)
    assert row_of(store).status == "running"


def test_old_version_run_starts_once_its_configuration_is_known(store: Store) -> None:
    store.runs.begin(RUN, config().fixed_part())
    assert queue(store) == [], "nobody starts what an earlier server left"
    assert "does not have the complete configuration" in refusal(
        lambda: run_changes.change(store, RUN, RunStatus.RUNNING)
    )
    run_changes.create(store, config())
    assert queue(store) == [RUN]


# --- clones


def test_a_clone_has_the_settings_of_its_run_and_its_own(store: Store) -> None:
    run_changes.create(store, config(rounds=3))
    changes = ["run.rounds=20", "method.local_lr = 0.5", "server.torch_device=cpu", 'model.device="digits_linear"']
    cloned = run_changes.clone_settings(store, RUN, "second", changes)
    assert (cloned["run"]["name"], cloned["run"]["rounds"], cloned["run"]["seed"]) == ("second", 20, 0)
    assert (cloned["method"]["local_lr"], cloned["server"]["torch_device"]) == (0.5, "cpu")
    assert run_config(run_changes.clone_settings(store, RUN, "third", [])).contract == config().contract


def test_a_clone_with_the_name_of_its_run_is_refused(store: Store) -> None:
    run_changes.create(store, config())
    assert "has the name of the run" in refusal(lambda: run_changes.clone_settings(store, RUN, RUN, ["run.rounds=99"]))


def test_a_clone_never_changes_a_run_that_exists(store: Store) -> None:
    def clone(*changes: str) -> RunState:
        return run_changes.create(
            store, run_config(run_changes.clone_settings(store, RUN, "copy", changes)), start_it=True, may_change=False
        )

    run_changes.create(store, config(rounds=3))
    said = clone("run.rounds=7")
    before = row_of(store, "copy"), store.run_control.setup("copy"), store.history.events("copy")
    assert clone("run.rounds=7") == said, "a repetition"
    text = refusal(lambda: clone("run.rounds=1", "server.keep_rounds=9"))
    assert text.startswith("run 'copy' exists with other settings: run.rounds was 7, is 1; server.keep_rounds was 1, ")
    assert (row_of(store, "copy"), store.run_control.setup("copy"), store.history.events("copy")) == before


@pytest.mark.parametrize("change", ["rounds=3", "run.rounds", "=3", "run.=3", "run.name=other"])
def test_a_change_of_another_form_is_refused(store: Store, change: str) -> None:
    run_changes.create(store, config())
    assert refusal(lambda: run_changes.clone_settings(store, RUN, "second", [change])).startswith(
        f"--set is {change!r}, "
    )


def test_paths_of_a_stored_run_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = config().model_dump(by_alias=True, exclude_none=True)
    given["evaluation"] = {"data": "held-out.npz"}
    assert run_config(given).setup()["evaluation"]["data"] == str(tmp_path / "held-out.npz")


def fail() -> None:
    raise StoreError("no space")


def test_the_servers_log_has_each_call_once_wherever_it_was_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.0)
    caplog.set_level("INFO", "fleetdistill.server.operators")
    store = Store.open(tmp_path)
    store.operator_calls.add(Call(LOCAL, "root", "ChangeRun", {"run": "old"}), "done")
    log = CallLog(store)
    run_changes.create(store, config(), start_it=True)
    assert LocalStore(tmp_path).change("digits", RunStatus.STOPPED).status == "stopped"
    begun = store.operator_calls.begin(Call("operator", "olga", "DeleteRun", {"run": "digits"}, "ipv4:10.0.0.7:4040"))
    log.look()
    log.look()
    store.operator_calls.settle(begun, "done: run 'digits' is deleted")
    store.operator_calls.add(Call("operator", "olga", "RevokeDevice", {"device": "camera-7", "reason": ""}), "done")
    store.operator_calls.add(Call("operator", "olga", "RevokePerson", {"role": "viewer", "name": "vic"}), "done")
    wanted = {"run": "digits", "status": "running"}
    refused = Call("viewer", "vera", "ChangeRun", wanted, "ipv4:10.0.0.8:4040")
    store.operator_calls.add(refused, "refused: not-allowed: no", refused=True)
    with pytest.raises(StoreError, match="no space"):
        local_log(store).around(Call(LOCAL, "root", "Backup"), fail, lambda result: Outcome())
    log.look()
    log.look()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    olga = "operator olga from ipv4:10.0.0.7:4040: DeleteRun"
    assert lines == [
        ("INFO", f"{local_user()} on the store's machine: ChangeRun stop: done: run 'digits' is stopped"),
        ("INFO", f"{olga}: begun"),
        ("INFO", f"{olga}: done: run 'digits' is deleted"),
        ("INFO", "operator olga from local: RevokeDevice camera-7: done"),
        ("INFO", "operator olga from local: RevokePerson viewer vic: done"),
        ("WARNING", "viewer vera from ipv4:10.0.0.8:4040: ChangeRun start: refused: not-allowed: no"),
        ("WARNING", "root on the store's machine: Backup: failed: no space"),
    ]
    assert {getattr(record, "about_run", "digits") for record in caplog.records} == {"digits"}
    store.close()
