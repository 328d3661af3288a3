"""`fleetdistill runs show --server`: the same as beside the store, over real TLS."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.live_front import RUN, prepare_store, write_asks
from support.secured import make_pki, secured_front
from typer.testing import CliRunner

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.methods import METHODS
from fleetdistill.methods.classstats.exchange import LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT
from fleetdistill.replacement import REPLACED, SPLIT
from fleetdistill_server.cli.app import app
from fleetdistill_server.methods import server_class
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

DEVICES = ("a", "b")
FIGURES = {
    "teacher_accuracy": {"a": 0.5, "b": 0.25},
    "cut_layer": {"a": "body.3", "b": "body.3"},
    "distillation_steps": 3,
    "effective_devices": 1.5,
    "strength": 812.5,
    "global_accuracy": 0.75,
    "refined_rows": {"kkr": 7},
}
DECLARED = {name: figure for method in METHODS for name, figure in server_class(method).figures.items()}
"""The figures of all methods, as if one method had them all."""


def play(store: Store) -> None:
    """Four rounds with every figure; a is left out of the last three, b has no answer in the last one."""
    for device in DEVICES:
        store.devices.register(RUN, device, b"", b"")
    for number in range(1, 5):
        store.runs.start_round(RUN, DEVICES)
        write_asks(store, number, *DEVICES)
        asks = store.asks.of_step(RUN, number, 1)
        for ask in asks:
            store.asks.accept_upload(ask.id, 1, bytes(32), 10, 5)
            store.history.add_figures(RUN, number, ask.device, told(number))
        for direction in ("up", "down"):
            sizes = Counted(Counter(plan=900), Counter(plan=400))  # 400 travel, and the header
            store.history.add_traffic(RUN, number, "a", direction, sizes, 100 * number)
        if number > 1:
            store.history.add_event(RUN, "update-left-out", "far off", number=number, device="a")
        store.history.add_event(RUN, "teacher-guard", "worse")
        used = [ask.id for ask in asks if number < 4 or ask.device == "a"]
        store.runs.close_round(RUN, number, store.blobs.put_state(b"c"), used, FIGURES)
    store.runs.set_status(RUN, RunStatus.FINISHED, "all rounds done")


def told(right: int) -> Metrics:
    """What a device with ten rows reports of a round; the share that is right grows."""
    test = [Metric(name=name, split="test", sum=right, count=10) for name in ("accuracy", "personal/accuracy")]
    left_out = [
        Metric(name=name, split="train", sum=right, count=10) for name in (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT)
    ]
    loss = Metric(name="loss", split="train", sum=3.0, count=10)
    return Metrics(metrics=[*test, *left_out, loss, Metric(name=REPLACED, split=SPLIT, sum=1.0, count=1)])


@dataclass
class Shown:
    """A store with a run, and how it is named on this machine and from another one."""

    store: Store
    authority: Authority
    here: list[str]
    there: list[str]
    port: int


@contextmanager
def shown_run(directory: Path) -> Iterator[Shown]:
    authority = make_pki(directory / "pki")
    authority.issue_person(Role.VIEWER, "vera", 1.0, directory / "vera")
    privacy = {"epsilon": 1.0, "delta": 1e-5, "exact": True}
    store = prepare_store(directory / "store", privacy, DECLARED)
    with secured_front(directory / "store", directory / "pki") as front:
        there = ["--server", f"127.0.0.1:{front.port}", "--identity", str(directory / "vera")]
        yield Shown(store, authority, ["--store", str(directory / "store")], there, front.port)
    store.close()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    with shown_run(tmp_path) as result:
        yield result


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["runs", "show", RUN, *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_run_is_shown_over_network_as_on_server_machine(shown: Shown) -> None:
    empty = said(*shown.here), said("--json", *shown.here)
    assert (said(*shown.there), said("--json", *shown.there)) == empty
    play(shown.store)
    assert said(*shown.there) == said(*shown.here)
    there = said("--json", *shown.there)
    assert there == said("--json", *shown.here)
    run = json.loads(there)
    assert run["privacy"] == "each row of each device is (1, 1e-5)-private against the server"
    assert run["rounds"][0]["strength"] == 812.5
    assert [row["suspects"] for row in run["rounds"]] == ["", "", "", "a"]
    assert [row["bytes_up"] for row in run["rounds"]] == [500, 600, 700, 800]
    assert (run["leave_one_out_general"], run["leave_one_out"][1]["general"]) == (0.4, 0.4)
    assert [row["device"] for row in run["reported_uploads"]] == ["b"]
    assert run["test_accuracy_of_answers"][0] == {"device": "a", "general": 0.4, "personal": 0.4}


def test_the_run_that_is_compared_has_a_value_in_every_column(shown: Shown) -> None:
    """Blanks are the same on both sides, whatever the protocol leaves out."""
    play(shown.store)
    run = json.loads(said("--json", *shown.here))
    assert [name for name, value in run["rounds"][-1].items() if value is None or value == ""] == []
    assert all(rows for rows in run.values() if isinstance(rows, list))
    totals = ("guards_fired", "models_replaced", "events_in_all", "leave_one_out_general", "leave_one_out_personal")
    assert all(run[name] for name in totals)


def test_a_fleet_that_does_not_fit_into_a_message_is_shown_whole(shown: Shown) -> None:
    devices = [f"{number:04d}{'x' * 60}" for number in range(1500)]
    with shown.store.transaction():
        for device in devices:
            shown.store.devices.register(RUN, device, b"", b"")
            shown.store.history.add_figures(RUN, 1, device, told(1))
            shown.store.history.add_traffic(RUN, 1, device, "up", Counted(Counter(plan=900), Counter(plan=400)), 100)
    run = json.loads(said("--json", *shown.there))
    for name in ("leave_one_out", "bytes", "test_accuracy_of_answers"):
        assert [row["device"] for row in run[name]] == devices
    assert run["leave_one_out_general"] == 0.1, "of all devices"
