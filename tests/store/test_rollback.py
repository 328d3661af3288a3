"""The way back: no checkpoint of a model that nothing can go on from, and `runs rollback` to the earlier ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.driving import DriveDevices
from support.fleets import RUNS, Prepared, assert_no_upload_lost, prepare
from support.processes import COMMAND
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, DamagedError, RunError
from fleetdistill.methods import METHODS
from fleetdistill.state.failpoints import VARIABLE
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.cli.app import app
from fleetdistill_server.engine.engine import Engine, reason_not_usable
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.intake.operator_log import local_user
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.backup import backup
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.rollback import RolledBack, roll_back
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views_of_runs


def play(prepared: Prepared, store: Store) -> None:
    """Engine and devices until the run is finished; a second call goes on with the devices' state directories."""
    config, specs, _ = prepared
    api = DeviceApi(store)
    with ExitStack() as stack:
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in specs]
        asyncio.run(Engine(store, config, DriveDevices(devices, lambda: None)).run())


def row_of(store: Store) -> Run:
    return store.runs.existing(RUN)


def statuses(store: Store) -> list[str]:
    return [row.status for row in store.runs.rounds(RUN)]


@pytest.mark.parametrize(
    ("method", "to"),
    [
        *(pytest.param(method, 1, marks=pytest.mark.long) for method in sorted(METHODS.keys() - {"fedavg"})),
        ("fedavg", 1),
        pytest.param("classstats", 0, marks=pytest.mark.long),
    ],
)
def test_devices_of_every_method_continue_from_rolled_back_state(method: str, to: int, tmp_path: Path) -> None:
    prepared, store = prepare(RUNS[method], tmp_path / "work"), Store.in_memory()
    play(prepared, store)
    kept = {checkpoint.round: checkpoint for checkpoint in store.runs.checkpoints(RUN)}
    assert list(kept) == [0, 1, 2]
    assert roll_back(store, RUN, to) == RolledBack(completed_rounds=to, undone=2 - to)
    row = row_of(store)
    assert (row.status, row.completed_rounds, row.checkpoint) == ("stopped", to, kept[to].sha256)
    assert statuses(store) == ["closed"] * to + ["undone"] * (2 - to)
    assert {upload.status for upload in store.asks.uploads(RUN) if upload.round > to} <= {"reported"}
    play(prepared, store)
    assert (row_of(store).status, row_of(store).completed_rounds) == ("finished", 2)
    assert statuses(store) == ["closed"] * to + ["undone"] * (2 - to) + ["closed"] * (2 - to)
    assert {upload.status for upload in store.asks.uploads(RUN) if upload.round > 2} <= {"used"}
    assert [event.kind for event in store.history.events(RUN, "rolled-back")] == ["rolled-back"]
    assert_no_upload_lost(store)
    store.close()


def test_the_newest_checkpoints_are_kept_and_all_others_deleted(tmp_path: Path) -> None:
    prepared, store = prepare(RUNS["fedavg"], tmp_path / "work"), Store.in_memory()
    config = prepared[0]
    run = config.run.model_copy(update={"rounds": 4})
    server = config.server.model_copy(update={"keep_checkpoints": 2})
    play((config.model_copy(update={"run": run, "server": server}), *prepared[1:]), store)
    kept = store.runs.checkpoints(RUN)
    assert [(item.round, item.completed_rounds) for item in kept] == [(3, 3), (4, 4)]
    assert {item.sha256 for item in kept} == set(store.blobs._states)  # type: ignore[attr-defined]
    assert kept[-1].sha256 == row_of(store).checkpoint
    with pytest.raises(
        ConfigurationError,
        match=r"has no checkpoint of round 1; available rounds: 3 \(3 completed\), 4 \(4 completed\)\. ",
    ):
        roll_back(store, RUN, 1)
    store.close()


@pytest.mark.parametrize("keep_rounds", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_what_a_rollback_finds_deleted_is_not_needed(keep_rounds: int, tmp_path: Path) -> None:
    prepared, store = prepare(RUNS["fedavg"], tmp_path / "work"), Store.open(tmp_path / "store")
    config = prepared[0]
    run = config.run.model_copy(update={"rounds": 4})
    server = config.server.model_copy(update={"keep_rounds": keep_rounds, "keep_checkpoints": 4})
    prepared = (config.model_copy(update={"run": run, "server": server}), *prepared[1:])

    def lost(name: str) -> list[str]:
        return backup(tmp_path / "store", tmp_path / name).lost

    play(prepared, store)
    assert lost("before") == []
    roll_back(store, RUN, 2)
    assert lost("rolled-back") == []
    play(prepared, store)
    assert (lost("continued"), statuses(store)) == ([], ["closed", "closed", "undone", "undone", "closed", "closed"])
    store.close()


# --- the command, on a store on the disk


@pytest.fixture
def played(location: Location, tmp_path: Path) -> tuple[Prepared, Path]:
    """A finished FedAvg run of two rounds."""
    prepared, directory = prepare(RUNS["fedavg"], tmp_path / "work"), tmp_path / "store"
    set_location(directory, location)
    store = Store.open(directory)
    play(prepared, store)
    store.close()
    return prepared, directory


def command(directory: Path, *given: str) -> Any:
    return CliRunner().invoke(app, ["runs", "rollback", *given, "--store", str(directory)])


def test_the_command_says_what_it_did(played: tuple[Prepared, Path]) -> None:
    prepared, directory = played
    done = command(directory, RUN, "--to", "1")
    assert (done.exit_code, done.stdout) == (
        0,
        f"run '{RUN}' is rolled back to round 1: 1 round undone, 1 completed round left; "
        "start or serve it to continue\n",
    )
    store = Store.open(directory)
    shown = CliRunner().invoke(app, ["runs", "show", RUN, "--store", str(directory), "--json"])
    assert [item["status"] for item in json.loads(shown.stdout)["rounds"]] == [
        "closed",
        "undone: the run was rolled back to the state after round 1",
    ]
    assert json.loads(shown.stdout)["checkpoints_after_rounds"] == [0, 1]
    (event,) = store.history.events(RUN, "rolled-back")
    assert event.text == f"the run was rolled back to the state after round 1 by {local_user()} on the store's machine"
    play(prepared, store)
    assert statuses(store) == ["closed", "undone", "closed"]
    store.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["other", "--to", "1"], "there is no run 'other'"),
        (
            [RUN, "--to", "7"],
            "--to is 7, but run 'simulation' has no checkpoint of round 7; available rounds: 0 (0 completed), 1 (1 "
            "completed), 2 (2 completed). They are numbered as in `runs show`, where short rounds count too",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(given: list[str], told: str, played: tuple[Prepared, Path]) -> None:
    done = command(played[1], *given)
    assert done.exit_code == 1
    assert told in done.output


def test_later_checkpoints_are_gone_and_undone_round_is_refused(played: tuple[Prepared, Path]) -> None:
    store = Store.open(played[1])
    undone = store.runs.checkpoints(RUN)[2].sha256
    assert roll_back(store, RUN, 1) == RolledBack(completed_rounds=1, undone=1)
    assert [checkpoint.round for checkpoint in store.runs.checkpoints(RUN)] == [0, 1]
    assert not store.blobs.has(undone)
    with pytest.raises(
        ConfigurationError, match=r"has no checkpoint of round 2; available rounds: 0 \(0 completed\), 1 "
    ):
        roll_back(store, RUN, 2)
    with pytest.raises(RunError, match="has no checkpoint of round 2"):
        store.runs.roll_back(RUN, 2)
    assert row_of(store).completed_rounds == 1
    assert row_of(store).engine is None, "the next start is no restart after a crash"
    store.close()


@pytest.mark.parametrize(
    ("served", "status", "told"),
    [
        (RUN, "finished", f"run '{RUN}' is being served; stop its server first"),
        ("", "running", f"run '{RUN}' is running; stop it first with `fleetdistill runs stop {RUN}`"),
        pytest.param("", "stopped", "1 completed round left; start or serve it to continue", marks=pytest.mark.long),
        ("", "finished", "1 completed round left; start or serve it to continue"),
        ("another", "running", "1 completed round left"),
    ],
)
def test_a_run_that_a_server_works_on_is_stopped_first(
    served: str, status: str, told: str, played: tuple[Prepared, Path]
) -> None:
    store = Store.open(played[1])
    store.runs.set_status(RUN, RunStatus(status), "")
    with serve_lock.take(played[1], served):
        done = command(played[1], RUN, "--to", "1")
    refused = "stop" in told
    assert told in done.output
    assert (done.exit_code, row_of(store).completed_rounds) == ((1, 2) if refused else (0, 1))
    assert row_of(store).status == (status if refused else "stopped")
    store.close()


def test_unreadable_checkpoint_leaves_run_unchanged(played: tuple[Prepared, Path]) -> None:
    store = Store.open(played[1])
    before = row_of(store)
    store.blobs.drop(store.runs.checkpoints(RUN)[1].sha256)
    with pytest.raises(DamagedError, match=rf"is not in the store; .*rollback {RUN} --to 2. returns to the newest"):
        roll_back(store, RUN, 1)
    assert row_of(store) == before
    store.close()


def test_a_checkpoint_without_its_file_is_not_listed(played: tuple[Prepared, Path]) -> None:
    store = Store.open(played[1])
    store.blobs.drop(store.runs.checkpoints(RUN)[1].sha256)
    assert views_of_runs.run(store, RUN).facts["checkpoints_after_rounds"] == [0, 2]
    with pytest.raises(ConfigurationError, match=r"available rounds: 0 \(0 completed\), 2 \(2 completed\)\."):
        roll_back(store, RUN, 7)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["rollback.before-commit", "rollback.after-commit"])
def test_a_rollback_that_is_killed_is_whole_or_not_there(point: str, played: tuple[Prepared, Path]) -> None:
    given = ["runs", "rollback", RUN, "--to", "1", "--store", str(played[1])]
    killed = subprocess.run([*COMMAND, *given], env={**os.environ, VARIABLE: f"{point}=kill"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    store = Store.open(played[1])
    whole = point == "rollback.after-commit"
    assert (row_of(store).completed_rounds, statuses(store)[1]) == ((1, "undone") if whole else (2, "closed"))
    if not whole:
        roll_back(store, RUN, 1)
    play(played[0], store)
    assert row_of(store).status == "finished"
    assert_no_upload_lost(store)
    store.close()


def test_rollback_takes_run_and_open_round_from_unknown_engine(tmp_path: Path) -> None:
    config, specs, _ = prepare(RUNS["fedavg"], tmp_path / "work")
    store = Store.in_memory()
    api = DeviceApi(store)
    with ExitStack() as stack:
        devices = [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in specs]

        def operator() -> None:
            if row_of(store).completed_rounds == 1 and store.asks.uploads(RUN)[-1].round == 2:
                roll_back(store, RUN, 0)

        with pytest.raises(RunError, match="was taken over by another engine"):
            asyncio.run(Engine(store, config, DriveDevices(devices, operator)).run())
    assert statuses(store) == ["undone", "short"]
    assert_no_upload_lost(store)
    play((config, specs, tmp_path), store)
    assert statuses(store) == ["undone", "short", "closed", "closed"]
    store.close()


# --- no checkpoint of a model that nothing can go on from


def spoil(change: Callable[[FedAvgServer], None]) -> Callable[[FedAvgServer, Cohort], Any]:
    """FedAvg's round, after which the model of round 2 is spoiled."""
    honest = FedAvgServer.round

    async def spoiled(self: FedAvgServer, cohort: Cohort) -> None:
        await honest(self, cohort)
        if cohort.round == 2:
            change(self)

    return spoiled


def first_weight(server: FedAvgServer) -> torch.Tensor:
    return next(iter(server.model.state_dict().values()))


def variance(server: FedAvgServer) -> torch.Tensor:
    return next(one for name, one in server.model.state_dict().items() if name.endswith("running_var"))


SPOILED: dict[str, tuple[Callable[[FedAvgServer], None], str]] = {
    "not a number": (lambda server: first_weight(server).fill_(float("nan")), "is not finite"),  # type: ignore[dict-item]
    "infinite": (lambda server: first_weight(server).view(-1)[0].fill_(float("inf")), "is not finite"),  # type: ignore[dict-item]
    "a negative variance": (lambda server: variance(server).fill_(-1.0), "running_var has a negative value, -1 "),  # type: ignore[dict-item]
    "too large to score": (lambda server: first_weight(server).fill_(3e38), "the global model cannot be scored"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_model_is_no_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, told = SPOILED[name]
    monkeypatch.setattr(FedAvgServer, "round", spoil(change))
    store = Store.in_memory()
    play(prepare(RUNS["fedavg"], tmp_path / "work"), store)
    assert statuses(store) == ["closed", "short", "closed"]
    (event,) = store.history.events(RUN, "round-undone")
    assert event.round == 2
    assert event.text.endswith("the run keeps the state from before the round")
    assert told in event.text
    assert reason_not_usable(unpack_state(store.blobs.get_state(row_of(store).checkpoint))) is None
    assert_no_upload_lost(store)
    store.close()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"model": {"a.weight": torch.ones(2)}, "step": 3, "names": ["d0"], "empty": torch.empty(0)}, None),
        ({"model": {"a.weight": torch.tensor([1.0, float("nan")])}}, "model.a.weight is not finite"),
        ({"optimizer": [{"momentum": torch.tensor(-float("inf"))}]}, "optimizer.0.momentum is not finite"),
        ({"bn.running_var": torch.tensor([0.0, -1e-3])}, "bn.running_var has a negative value, -0.001"),
        ({"bn.running_mean": torch.tensor([0.0, -1e-3]), "n": torch.tensor([-1])}, None),
    ],
)
def test_which_states_no_model_can_compute_with(state: dict[str, Any], reason: str | None) -> None:
    assert reason_not_usable(state) == reason
