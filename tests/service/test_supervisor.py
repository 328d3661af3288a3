"""`fleetdistill serve` as an operator has it: processes that die, are stopped, and are started again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.answering import AnsweringDevice, AnsweringFleet
from support.processes import COMMAND, PATIENCE_SECONDS, children, is_alive, kill_in, wait_until
from support.serving import ENGINE, FRONT, RUN, Served, completed, serve, write_config

from fleetdistill.errors import FleetDistillError, LinkError, RefusedError, RunError
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.service import engine_process
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow


def run_row(store: Store) -> Run:
    return store.runs.existing(RUN)


def settled(store: Store) -> bool:
    """Every acknowledged upload of an ended round is used or reported with a reason."""
    ended = {row.number for row in store.runs.rounds(RUN) if row.status != "open"}
    uploads = [row for row in store.asks.uploads(RUN) if row.round in ended]
    return all(row.status == "used" or (row.status == "reported" and row.reason) for row in uploads)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def test_a_port_in_use_is_one_sentence(tmp_path: Path, busy_port: int) -> None:
    config = write_config(tmp_path, server_listen=f"127.0.0.1:{busy_port}")
    done = subprocess.run([*COMMAND, "serve", str(config)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{busy_port}" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert f"127.0.0.1:{busy_port}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_changed_configuration_is_refused_and_says_what_changed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.runs.begin(RUN, load_run_config(write_config(tmp_path)).fixed_part())
    store.runs.close_round(RUN, store.runs.start_round(RUN, []), b"checkpoint", [], {})
    changed = write_config(tmp_path, run_rounds=7, method_beta=2.5)
    done = subprocess.run([*COMMAND, "serve", str(changed)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert "exists with another configuration: method.beta was None, is 2.5; put the old" in done.stderr
    store.close()


def test_where_a_run_is_served_may_change(tmp_path: Path) -> None:
    for listen, lease in (("127.0.0.1:0", 60.0), ("localhost:0", 30.0)):
        path = write_config(tmp_path, server_listen=listen, server_lease_seconds=lease)
        supervisor = Supervisor(load_run_config(path))
        supervisor.store.close()
        supervisor.lock.close()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_cleanly_and_next_start_continues(number: int, tmp_path: Path) -> None:
    """In the middle of a round. Children end whichever way the supervisor does, also if it is killed."""
    with contextlib.ExitStack() as stack:
        with serve(write_config(tmp_path)) as served:
            port = served.port()
            stack.enter_context(AnsweringFleet(port, RUN, 2))
            store = Store.open(tmp_path / "store")
            wait_until(lambda: completed(store) >= 3, "three rounds")
            served.child(ENGINE), served.child(FRONT)
            wait_until(lambda: _asks_open(store), "a moment in mid-round")
            pids = children(served.process.pid)
            assert len(pids) >= 2
            served.process.send_signal(number)
            assert served.process.wait(PATIENCE_SECONDS) == 0
            assert [pid for pid in pids if is_alive(pid)] == []
            assert run_row(store).status == "running", "an open round goes on at the next start"
        assert "continues the run" in "".join(served.said)
        assert "Traceback" not in "".join(served.said)
        before = completed(store)
        with serve(write_config(tmp_path, server_listen=f"127.0.0.1:{port}")) as again:
            wait_until(lambda: completed(store) >= before + 3, "three more rounds")
            pids = [again.child(ENGINE), again.child(FRONT)]
            again.process.kill()
            wait_until(lambda: not any(is_alive(pid) for pid in pids), "the children to end")
    rounds = store.runs.rounds(RUN)
    assert [row.number for row in rounds] == list(range(1, len(rounds) + 1))
    assert sum(row.status == "closed" for row in rounds) == completed(store)
    assert settled(store)
    store.close()


def test_a_server_whose_store_is_replaced_ends(tmp_path: Path) -> None:
    """As by an operator who puts a restored store in place and forgets to stop the server."""
    Store.open(tmp_path / "restored").close()
    with serve(write_config(tmp_path)) as served:
        served.port()
        (tmp_path / "store").rename(tmp_path / "before")
        (tmp_path / "restored").rename(tmp_path / "store")
        assert served.process.wait(PATIENCE_SECONDS) == 1
    said = "".join(served.said)
    assert f"error: the store {tmp_path / 'store'} was moved, replaced or deleted while it was served" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.cold_start
def test_starting_child_ends_too_when_supervisor_is_killed(tmp_path: Path) -> None:
    with serve(write_config(tmp_path)) as served:
        pids = [served.child(FRONT), served.child(ENGINE)]  # the engine needs seconds to load torch
        served.process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the children to end")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Store, Path]]:
    """A run that is served to two devices, its store and its configuration; the tests leave it served."""
    config = write_config(tmp_path_factory.mktemp("shared"))
    with serve(config) as served, AnsweringFleet(served.port(), RUN, 2):
        store = Store.open(config.parent / "store")
        wait_until(lambda: completed(store) >= 1, "a round")
        yield served, store, config
        store.close()


def test_killed_children_are_started_again(shared: tuple[Served, Store, Path]) -> None:
    served, store, config = shared
    before_edit = run_row(store).config
    write_config(
        config.parent, run_seed=7, run_rounds=1, server_listen="127.0.0.1:1"
    )  # for the next start of the server
    for module in (ENGINE, FRONT):
        wait_until(lambda: kill_in(lambda: _asks_open(store), served.child(module)), "a moment in mid-round")  # noqa: B023
        before = completed(store)
        wait_until(lambda: completed(store) > before, "the next round")  # noqa: B023
    assert settled(store)
    assert "short" not in [row.status for row in store.runs.rounds(RUN)]
    assert run_row(store).config == before_edit


def _asks_open(store: Store) -> bool:
    return bool(store.runs.open_round(RUN)) and bool(store.asks.devices_with_open(RUN))


@pytest.mark.long
def test_second_server_of_same_run_does_not_disturb_first(shared: tuple[Served, Store, Path]) -> None:
    served, store, config = shared
    owner = run_row(store).engine
    write_config(config.parent, server_listen=f"127.0.0.1:{served.port()}")
    second = subprocess.run([*COMMAND, "serve", str(config)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert second.returncode == 1
    before = completed(store)
    wait_until(lambda: completed(store) > before + 2, "the first server to go on")
    assert run_row(store).engine == owner


BROKEN = """
from torch import nn

class Broken(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(2, classes)

    def forward(self, features):
        raise ValueError("this predictor always fails")

def make(feature_shape, classes):
    return Broken(classes)
"""


MENDED = BROKEN.replace(
    'raise ValueError("this predictor always fails")', "return self.layer(features.flatten(1)[:, :2])"
)


@pytest.mark.long
def test_engine_failing_at_same_point_is_given_up_until_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_predictor.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)  # the supervisor hands its own path on
    monkeypatch.setattr(engine_process, "MAX_FAILURES", 3)
    path = write_config(tmp_path, model_server="broken_predictor:make")
    log = tmp_path / "server.log"
    supervisor = Supervisor(load_run_config(path), log=log)
    failures: list[FleetDistillError] = []

    def run() -> None:
        try:
            supervisor.serve()
        except FleetDistillError as error:
            failures.append(error)

    serving = threading.Thread(target=run)
    serving.start()
    try:
        port = wait_until(lambda: supervisor.port or 0, "the front to listen")
        with AnsweringFleet(port, RUN, 2):
            serving.join(PATIENCE_SECONDS)
    finally:
        supervisor.stop()
        serving.join()
    assert [type(failure) for failure in failures] == [RunError]
    assert "failed 3 times at the same point" in str(failures[0])
    assert log.read_text().count("ValueError: this predictor always fails") == 3
    store = Store.open(tmp_path / "store")
    row = run_row(store)
    assert row.status == "stopped"
    assert row.reason.endswith("failed 3 times at the same point: ValueError: this predictor always fails")
    assert children(os.getpid(), ENGINE) == children(os.getpid(), FRONT) == []
    assert store.runs.open_round(RUN) is not None  # intact, for a start after the mend
    receipts = {upload.receipt for upload in store.asks.uploads(RUN)}
    assert receipts
    (tmp_path / "broken_predictor.py").write_text(MENDED)
    with serve(write_config(tmp_path, model_server="broken_predictor:make")):
        wait_until(lambda: completed(store) >= 1, "the round to end with the answers of before")
    assert run_row(store).status == "running"
    assert {upload.receipt for upload in store.asks.uploads(RUN) if upload.status == "used"} >= receipts
    assert settled(store)
    store.close()


@pytest.mark.long
def test_simulation_that_keeps_falling_short_ends_with_message(tmp_path: Path) -> None:
    """Two devices check in and never answer."""
    path = write_config(tmp_path, run_deadline_seconds=0.2)
    supervisor = Supervisor(load_run_config(path), log=tmp_path / "server.log", max_short_rounds=3)
    failures: list[FleetDistillError] = []

    def run() -> None:
        try:
            supervisor.serve()
        except FleetDistillError as error:
            failures.append(error)

    serving = threading.Thread(target=run)
    serving.start()
    try:
        port = wait_until(lambda: supervisor.port or 0, "the front to listen")
        with contextlib.ExitStack() as stack:
            links = [GrpcLink(f"127.0.0.1:{port}") for _ in range(2)]
            for number, link in enumerate(links):
                stack.callback(link.close)
                device = AnsweringDevice(link, RUN, f"d{number}")
                wait_until(lambda: _checked_in(device), "the run to be prepared")  # noqa: B023
            serving.join(PATIENCE_SECONDS)
    finally:
        supervisor.stop()
        serving.join()
    (failure,) = failures
    assert str(failure).startswith("3 rounds in a row fell short of the quorum; the last event is from round 3: ")
    store = Store.open(tmp_path / "store")
    assert (run_row(store).status, run_row(store).reason) == ("stopped", str(failure))
    store.close()


def _checked_in(device: AnsweringDevice) -> bool:
    try:
        device.step()
    except (LinkError, RefusedError):
        return False
    return True


def test_a_configuration_that_cannot_work_is_not_tried_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_server="no_such_module:make")
    store = Store.open(tmp_path / "store")
    store.runs.begin(RUN, load_run_config(path).fixed_part())
    contract = contract_pb2.Contract(threads=1)  # a new run would be refused before any process is started
    store.runs.publish_contract(RUN, contract.SerializeToString())
    store.close()
    with serve(path) as served:
        assert served.process.wait(PATIENCE_SECONDS) == 1
    said = "".join(served.said)
    (stops,) = [line for line in said.splitlines() if "the engine stops: " in line]
    assert stops.endswith(f"run={RUN} event=engine-failed")
    last = said.splitlines()[-1]
    assert last.startswith("error: the engine cannot run: [model] server: server model 'no_such_module:make': cannot")
