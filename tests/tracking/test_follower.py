"""What a follower copies from a store, to a real MLflow server and to event files, whatever happens on the way."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.long import long_except
from tracking.event_files import events_in, steps_in
from tracking.mlflow_server import MlflowServer, mlflow_server

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_console.tracking.follower import Followed, Follower
from fleetdistill_console.tracking.mlflow_tracker import ENVIRONMENT, MlflowTracker
from fleetdistill_console.tracking.run_figures import ACCURACY, ALONE, BYTES, points_since, results_in, settings_of
from fleetdistill_console.tracking.tensorboard_tracker import TensorBoardRun, TensorBoardTracker
from fleetdistill_console.tracking.tracker import Description, RoundPoint, Tracker
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.summaries import Summaries
from fleetdistill_server.store.traffic import Counted

RUN = "digits"
CONFIG = {"run": {"name": RUN, "method": "feddkc", "rounds": 9}, "method": {"server_beta": 1.5, "layers": [1, 2]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
            yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    opened.runs.begin(RUN, CONFIG)
    for device in ("a", "b"):
        opened.devices.register(RUN, device, b"", contract_pb2.DeviceProfile().SerializeToString())
    yield opened
    opened.close()


def add_rounds(store: Store, count: int) -> None:
    """Completes rounds: in round n, device a has accuracy n / 100 and device b three times that."""
    for _ in range(count):
        number = store.runs.start_round(RUN, ["a", "b"])
        for factor, device in ((1, "a"), (3, "b")):
            scores = Metric(name="accuracy", split="test", sum=number * factor, count=100)
            store.history.add_figures(RUN, number, device, Metrics(metrics=[scores]))
        store.runs.close_round(RUN, number, b"", [], {"global_accuracy": number / 10})


def follower(tmp_path: Path, connect: Callable[[], Tracker], **changes: Any) -> Follower:
    return Follower(Followed(str(tmp_path / "store"), **changes), "the tracker", connect)


def to_mlflow(tmp_path: Path, server: MlflowServer, **changes: Any) -> Follower:
    """Every test has an experiment of its own."""
    return follower(tmp_path, partial(MlflowTracker, server.uri, tmp_path.name), **changes)


def to_events(tmp_path: Path, **changes: Any) -> Follower:
    return follower(tmp_path, partial(TensorBoardTracker, tmp_path / "events"), **changes)


def directory_of(tmp_path: Path) -> Path:
    (result,) = (tmp_path / "events").iterdir()
    return result


# --- figures of the store


def test_round_has_means_over_devices_and_reports_of_method(store: Store) -> None:
    add_rounds(store, 2)
    first, second = points_since(store, RUN, 0)
    assert (first.step, second.step) == (1, 2)
    assert second.values["accuracy/test"] == pytest.approx((0.02 + 0.06) / 2)
    assert second.values["server/global_accuracy"] == pytest.approx(0.2)
    assert second.values["round/devices"] == 2
    assert second.values["round/completed"] == 1
    assert "loss/train" not in second.values
    assert points_since(store, RUN, 1) == [second]


def test_short_round_has_figures_and_open_or_undone_one_has_none(store: Store) -> None:
    store.runs.set_keep_checkpoints(RUN, 2)
    add_rounds(store, 2)
    store.runs.close_short_round(RUN, store.runs.start_round(RUN, ["a"]), "too few answers")
    store.runs.start_round(RUN, ["a"])
    assert [(item.step, item.values["round/completed"]) for item in points_since(store, RUN, 0)] == [
        (1, 1),
        (2, 1),
        (3, 0),
    ]
    store.runs.roll_back(RUN, 1)
    assert 2 not in [item.step for item in points_since(store, RUN, 0)]


def test_a_round_has_its_answers_its_bytes_and_its_seconds(store: Store) -> None:
    """Of three answers the method uses two, in a round of 12 seconds."""
    now = [1000.0]
    store.database.now = lambda: now[0]
    store.devices.register(RUN, "c", b"", contract_pb2.DeviceProfile().SerializeToString())
    number = store.runs.start_round(RUN, ["a", "b", "c"])
    row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "step": "train", "expects": {}, "seed": 1}
    row |= {"payload": None, "payload_bytes": 0, "deadline_at": 2000.0}
    store.asks.add([Ask(**row, device=device) for device in "abc"])
    asks = [ask.id for ask in store.asks.of_step(RUN, number, 1)]
    for ask in asks:
        store.asks.accept_upload(ask, 1, bytes(32), 10, 1)
    store.history.add_traffic(RUN, number, "a", "up", Counted(Counter(logits=100), Counter(logits=40)), 10)
    store.history.add_traffic(RUN, number, "a", "down", Counted(Counter(plan=900), Counter(plan=700)), 10)
    store.history.add_event(RUN, "teacher-guard", "held back", number=number, device="a")
    now[0] += 12
    store.runs.close_round(RUN, number, b"", asks[:2], {})
    (point,) = points_since(store, RUN, 0)
    assert point.values == {
        "round/completed": 1,
        "round/devices": 3,
        "round/used": 2,
        "round/reported": 1,
        "round/seconds": 12,
        "round/guards": 1,
        "bytes/up": 50,
        "bytes/down": 710,
    }


def test_rounds_ending_while_figures_are_read_wait_for_next_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add_rounds(store, 1)
    read = Summaries.mean_figures

    def read_while_rounds_end(*span: Any) -> Any:
        result = list(read(*span))
        add_rounds(store, 2)
        return result

    monkeypatch.setattr(Summaries, "mean_figures", read_while_rounds_end)
    assert ["accuracy/test" in item.values for item in points_since(store, RUN, 0)] == [True]


def test_device_names_and_numbers_cannot_fill_or_break_tracker(store: Store) -> None:
    number = store.runs.start_round(RUN, ["a", "b"])
    made_up = [Metric(name=f"{name}/accuracy", split="test", sum=1, count=10) for name in "abcdefgh"]
    strange = [Metric(name="p é/\n/accuracy", split="test", sum=1, count=10)]
    other = [Metric(name="accuracy", split="made up", sum=1, count=10), Metric(name="x", split="test", sum=1, count=1)]
    endless = [Metric(name="loss", split="train", sum=math.inf, count=1)]
    store.history.add_figures(RUN, number, "a", Metrics(metrics=[*made_up, *strange, *other, *endless]))
    store.history.add_figures(RUN, number, "b", Metrics(metrics=strange))
    store.runs.close_round(RUN, number, b"", [], {})
    (point,) = points_since(store, RUN, 0)
    names = [name for name in point.values if name.startswith(("accuracy", "loss"))]
    assert len(names) == 4  # the most common ones
    assert "accuracy/test_p____" in names
    assert all(math.isfinite(value) for value in point.values.values())


def test_settings_have_names_with_dots() -> None:
    assert settings_of({**CONFIG, "proxy": {"data": ""}}) == {
        "run.name": RUN,
        "run.method": "feddkc",
        "run.rounds": "9",
        "method.server_beta": "1.5",
        "method.layers": "[1, 2]",
    }


# --- event files


def test_event_files_repeat_no_round_after_restart_or_torn_end(store: Store, tmp_path: Path) -> None:
    add_rounds(store, 2)
    assert to_events(tmp_path).look()
    directory = directory_of(tmp_path)
    (file,) = directory.glob("events.*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])  # as a killed process or a full disk leaves it
    add_rounds(store, 1)
    for _ in range(2):
        again = to_events(tmp_path)
        assert again.look()
        add_rounds(store, 1)
        assert again.look()
    assert steps_in(directory, "accuracy/test") == [1, 2, 3, 4, 5]
    values = [Scalar.value for Scalar in events_in(directory).Scalars("server/global_accuracy")]
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert directory_of(tmp_path) == directory


def test_event_files_show_the_settings_once(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        assert to_events(tmp_path).look()
    result = events_in(directory_of(tmp_path))
    (text,) = result.Tensors("settings/text_summary")
    assert b"| run.method | `feddkc` |" in text.tensor_proto.string_val[0]
    assert len(result.Tensors("_hparams_/session_start_info")) == 1


def test_a_run_of_the_same_name_has_a_directory_of_its_own(store: Store, tmp_path: Path) -> None:
    watching = to_events(tmp_path)
    add_rounds(store, 1)
    assert watching.look()
    store.runs.delete(RUN)
    store.runs.begin(RUN, CONFIG)
    add_rounds(store, 2)
    assert watching.look()
    assert sorted(steps_in(item, "accuracy/test") for item in (tmp_path / "events").iterdir()) == [[1], [1, 2]]


def test_all_runs_of_a_store_are_followed_unless_one_is_named(store: Store, tmp_path: Path) -> None:
    store.runs.begin("other", CONFIG)
    assert to_events(tmp_path, run="other").look()
    assert len(list((tmp_path / "events").iterdir())) == 1
    assert to_events(tmp_path).look()
    assert len(list((tmp_path / "events").iterdir())) == 2


def test_simulations_of_one_store_are_told_apart_by_their_start(store: Store, tmp_path: Path) -> None:
    """Simulated time begins at the same moment in each of them."""
    add_rounds(store, 1)
    for began in (86_400.0, 172_800.0, 86_400.0):
        assert to_events(tmp_path, began=began).look()
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "events").iterdir())
    assert names == ["digits-19700102-000000", "digits-19700103-000000"]


def test_notes_beside_event_files_stay_when_another_is_made(tmp_path: Path) -> None:
    described = Description("0" * 32, RUN, 1000.0)
    run = TensorBoardTracker(tmp_path).open(described)
    run.set_note("model.round", "3")
    run.end("running", "")
    run.close()
    again = TensorBoardTracker(tmp_path).open(described)
    assert (again.note("model.round"), again.note("status")) == ("3", "running")
    again.close()


def test_a_status_with_another_reason_is_copied(store: Store, tmp_path: Path) -> None:
    watching = to_events(tmp_path)
    said = []
    for reason in ("out of patience", "by the operator"):
        store.runs.set_status(RUN, RunStatus.STOPPED, reason)
        assert watching.look()
        said.append(json.loads((directory_of(tmp_path) / "fleetdistill.json").read_text())["status"])
    assert said == ["stopped: out of patience", "stopped: by the operator"]


@pytest.mark.slow
def test_the_model_of_a_run_that_is_over_is_exported_once(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure, as of this run without a model, is not repeated at each start of the server either."""
    caplog.set_level(logging.INFO, "fleetdistill.server.tracking")
    add_rounds(store, 2)
    store.runs.set_status(RUN, RunStatus.FINISHED, "")
    for _ in range(2):
        assert to_events(tmp_path).look()
    assert len([text for text in caplog.messages if "the server's model is not tracked" in text]) == 1


def test_a_follower_that_is_stopped_copies_the_last_rounds_first(store: Store, tmp_path: Path) -> None:
    add_rounds(store, 2)
    stopped = threading.Event()
    stopped.set()
    to_events(tmp_path).follow(stopped)
    assert steps_in(directory_of(tmp_path), "accuracy/test") == [1, 2]


def test_a_round_that_was_written_in_part_is_completed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by MLflow, to which each figure is a call of its own: it goes away within round 2."""
    write = TensorBoardRun.write

    def write_each(run: TensorBoardRun, points: Sequence[RoundPoint]) -> None:
        for point in points:
            for name, value in point.values.items():
                write(run, [RoundPoint(point.step, point.at, {name: value})])
                if (point.step, name) == (2, "round/seconds"):
                    raise OSError("the tracker is away")

    monkeypatch.setattr(TensorBoardRun, "write", write_each)
    watching = to_events(tmp_path)
    copied = []
    for _ in range(3):
        add_rounds(store, 1)
        copied.append(watching.look())
    assert copied == [True, False, True]
    assert steps_in(directory_of(tmp_path), "accuracy/test") == [1, 2, 3]


# --- MLflow


@pytest.mark.long
@pytest.mark.slow
def test_mlflow_has_settings_and_each_round_once_after_restart(
    store: Store, tmp_path: Path, server: MlflowServer
) -> None:
    add_rounds(store, 2)
    assert to_mlflow(tmp_path, server).look()
    add_rounds(store, 2)
    store.runs.set_status(RUN, RunStatus.STOPPED, "out of patience")
    assert to_mlflow(tmp_path, server).look()
    (run,) = server.runs(tmp_path.name)
    assert server.steps(run, "accuracy/test") == [1, 2, 3, 4]
    assert server.steps(run, "round/used") == [1, 2, 3, 4]
    assert run.data.metrics["server/global_accuracy"] == pytest.approx(0.4)
    assert run.data.params["run.method"] == "feddkc"
    assert (run.info.run_name, run.info.status) == (RUN, "FAILED")
    assert run.data.tags["fleetdistill.status"] == "stopped: out of patience"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy/test", "round/seconds"])
def test_a_round_that_mlflow_has_in_part_is_completed(
    name: str, store: Store, tmp_path: Path, server: MlflowServer
) -> None:
    add_rounds(store, 1)
    assert to_mlflow(tmp_path, server).look()
    (run,) = server.runs(tmp_path.name)
    server.client().log_metric(run.info.run_id, name, 0.04, step=2)  # the first of round 2, then a kill
    add_rounds(store, 2)
    assert to_mlflow(tmp_path, server).look()
    for item in ("accuracy/test", "round/seconds", "bytes/up"):
        assert server.steps(run, item) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.slow
def test_a_changed_setting_is_a_tag_and_a_resumed_run_runs_again(
    store: Store, tmp_path: Path, server: MlflowServer
) -> None:
    store.runs.set_status(RUN, RunStatus.STOPPED, "")
    assert to_mlflow(tmp_path, server).look()
    store.runs.change(RUN, {**CONFIG, "run": {**CONFIG["run"], "rounds": 12}}, None)
    store.runs.set_status(RUN, RunStatus.RUNNING, "")
    assert to_mlflow(tmp_path, server).look()
    (run,) = server.runs(tmp_path.name)
    assert run.data.params["run.rounds"] == "9"
    assert run.data.tags["fleetdistill.changed.run.rounds"] == "12"
    assert run.info.status == "RUNNING"


@pytest.mark.long
@pytest.mark.slow
def test_what_mlflow_missed_while_it_was_away_is_written_later(
    store: Store,
    tmp_path: Path,
    server: MlflowServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server hangs, and later does what it was asked for, although the follower has given up on it."""
    caplog.set_level(logging.INFO, "fleetdistill.server.tracking")
    watching = to_mlflow(tmp_path, server)
    add_rounds(store, 1)
    assert watching.look()
    with server.paused():
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        for _ in range(3):
            add_rounds(store, 1)
            assert not watching.look()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100")
    assert watching.look()
    (run,) = server.runs(tmp_path.name)
    assert server.steps(run, "accuracy/test") == [1, 2, 3, 4]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the run goes on and they are written later" in warnings[0]
    assert "figures are written to the tracker again" in caplog.text


def test_fedavg_is_a_control_of_other_methods_only(tmp_path: Path) -> None:
    curves = [{"name": "FedAvg devices", "accuracy": [0.3, 0.4], "bytes": [100.0, 200.0]}]
    result = {}
    for method in ("fedavg", "feddkc"):
        report: dict[str, Any] = {"method": method, "finished": False, "curves": curves, "alone_accuracy_by_round": {}}
        (tmp_path / "report.json").write_text(json.dumps(report))
        results = results_in(tmp_path, [1, 2])
        assert results is not None
        result[method] = [point.step for point in results.points], list(results.controls)
    assert result == {"fedavg": ([1, 2], []), "feddkc": ([], ["FedAvg devices"])}


def test_figures_of_a_report_have_the_numbers_of_their_rounds(tmp_path: Path) -> None:
    """Rounds 2 and 5 are completed; controls count theirs from 1, and a device without a figure does not count."""
    curves = [
        {"name": "feddkc", "accuracy": [0.5, 0.75], "bytes": [10.0, 20.0]},
        {"name": "FedAvg global", "accuracy": [0.3, None, 0.4], "bytes": [100.0, 200.0, 300.0]},
    ]
    alone = {"a": [0.2, None], "b": [0.4, 0.8]}
    report = {"method": "feddkc", "finished": False, "curves": curves, "alone_accuracy_by_round": alone}
    (tmp_path / "report.json").write_text(json.dumps(report))
    results = results_in(tmp_path, [2, 5])
    assert results is not None
    assert [(point.step, point.values) for point in results.points] == [
        (2, {ACCURACY: 0.5, BYTES: 10.0}),
        (5, {ACCURACY: 0.75, BYTES: 20.0}),
    ]
    assert [item.step for item in results.controls["FedAvg global"]] == [1, 2, 3]
    result = [(item.step, item.values[ACCURACY]) for item in results.controls[ALONE]]
    assert result == [(1, pytest.approx(0.3)), (2, 0.8)]


HOSTILE_REPLIES = {
    "failure": (500, b"{}"),
    "garbage": (200, b"\x00\xff" * 1000),
    "list": (200, b"[1]"),
    "deep": (200, b"[" * 100_000),
    "types": (200, b'{"experiment": {"experiment_id": [1], "tags": 5}}'),
    "elsewhere": (307, b""),
}


class HostileMlflow(BaseHTTPRequestHandler):
    reply: tuple[int, bytes]

    def do_GET(self) -> None:
        status, body = self.reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", self.path)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.long
@pytest.mark.parametrize("kind", long_except(HOSTILE_REPLIES, "failure", "garbage"))
def test_a_hostile_mlflow_is_a_warning(
    kind: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    add_rounds(store, 1)
    hostile = type("Hostile", (HostileMlflow,), {"reply": HOSTILE_REPLIES[kind]})
    with ThreadingHTTPServer(("127.0.0.1", 0), hostile) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{served.server_port}"
        following = follower(tmp_path, partial(MlflowTracker, uri))
        for _ in range(2):
            assert not following.look()
        served.shutdown()
    warnings = [
        record.message for record in caplog.records if record.levelno >= logging.WARNING and "figures" in record.message
    ]
    assert len(warnings) == 1
    assert "cannot write figures to the tracker, the run goes on and they are written later" in warnings[0]


@pytest.mark.long
@pytest.mark.slow
def test_simulation_results_are_added_with_controls_below(store: Store, tmp_path: Path, server: MlflowServer) -> None:
    add_rounds(store, 2)
    out = tmp_path / "out"
    (out / "onnx").mkdir(parents=True)
    (out / "onnx" / "device-0.onnx").write_bytes(b"model")
    curves = [
        {"name": "feddkc", "accuracy": [0.5, 0.6], "bytes": [10.0, 20.0]},
        {"name": "feddkc global", "accuracy": [None, 0.7], "bytes": [10.0, 20.0]},
        {"name": "FedAvg devices", "accuracy": [0.3, 0.4], "bytes": [100.0, 200.0]},
    ]
    alone = {"a": [0.1, 0.3], "b": [0.3, 0.5]}
    report = {"method": "feddkc", "finished": True, "curves": curves, "alone_accuracy_by_round": alone}
    (out / "report.json").write_text(json.dumps(report))
    for _ in range(2):
        assert to_mlflow(tmp_path, server, title="feddkc, seed 0", began=1e9, results=str(out)).look()
    runs = {run.info.run_name: run for run in server.runs(tmp_path.name)}
    main = runs.pop("feddkc, seed 0")
    assert server.steps(main, "simulation/accuracy") == [1, 2]
    assert main.data.metrics["simulation/accuracy_global"] == 0.7
    assert sorted(server.files(main)) == ["onnx", "report.json"]
    assert server.files(main, "onnx") == ["onnx/device-0.onnx"]
    assert {name: run.data.metrics["simulation/accuracy"] for name, run in runs.items()} == pytest.approx(
        {"feddkc, seed 0: FedAvg devices": 0.4, "feddkc, seed 0: local training only": 0.4}
    )
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {main.info.run_id}


def test_follower_ends_when_told_and_copies_last_rounds_first(store: Store, tmp_path: Path) -> None:
    stopped = threading.Event()
    following = threading.Thread(target=to_events(tmp_path).follow, args=(stopped,))
    following.start()
    add_rounds(store, 3)
    stopped.set()
    following.join()
    assert steps_in(directory_of(tmp_path), "accuracy/test") == [1, 2, 3]
